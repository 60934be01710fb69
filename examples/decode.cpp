// Decodes with an engine's target and without Python: libtorch, the package that AOTInductor made,
// the mapped weights and specc's operators are all that it takes. One sequence, greedily, without
// speculation; EOS does not end it. Token ids and positions that the model lacks end the process.
//
//     TORCH=$(python -c 'import torch; print(torch.__path__[0])')  # or a libtorch of this version
//     g++ -std=c++20 -O1 examples/decode.cpp -o decode -I$TORCH/include
//         -L$TORCH/lib -Wl,-rpath,$TORCH/lib,--allow-shlib-undefined -ltorch_cpu -lc10
//     ./decode ENGINE NUM_TOKENS TOKEN_ID...
//
// ENGINE is what `specc compile --backend cpu` wrote; TOKEN_ID... is the prompt. Prints token ids.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/frontend/parser.h>

#include <filesystem>
#include <iostream>

// What specc writes as JSON is a Python literal too, and libtorch has a parser of Python: a dict is
// a list of keys and a list of values, a list wraps its items, a number or string wraps its text.
struct Json {
  torch::jit::TreeRef tree;

  static Json parse(const at::Tensor& bytes) {
    const std::string text(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
    return {torch::jit::Parser(std::make_shared<torch::jit::Source>(text)).parseExp().tree()};
  }
  const torch::jit::TreeList& items() const { return tree->tree(0)->trees(); }
  const std::string& text() const { return tree->tree(0)->stringValue(); }
  std::vector<int64_t> integers() const {
    std::vector<int64_t> found;
    for (const auto& item : items()) found.push_back(std::stoll(Json{item}.text()));
    return found;
  }
  Json operator[](const std::string& key) const {
    for (size_t i = 0; i < items().size(); ++i)
      if (Json{items()[i]}.text() == key) return {tree->tree(1)->tree(i)};
    TORCH_CHECK(false, "no ", key);
  }
};

at::Tensor map_file(const std::filesystem::path& path) {
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  return at::from_file(path.c_str(), /*shared=*/false, size, at::kByte);
}

int main(int argc, char** argv) try {
  TORCH_CHECK(argc > 3, argc - 1, " arguments");
  const std::filesystem::path engine = argv[1], target = engine / "target";
  std::vector<int64_t> tokens;
  for (int i = 3; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
  const int64_t num_prompt = argc - 3, max_len = num_prompt + std::stoll(argv[2]);
  const c10::InferenceMode guard;

  const std::string library = engine / "native" / "libspecc_cpu.so";
  TORCH_CHECK(dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL), dlerror());
  torch::inductor::AOTIModelPackageLoader model(target / "program.pt2");

  // safetensors: the length of a JSON header, the header, the data
  const at::Tensor file = map_file(target / "weights.safetensors");
  const int64_t data = 8 + file.slice(0, 0, 8).view(at::kLong).item<int64_t>();
  const Json header = Json::parse(file.slice(0, 8, data));

  // weights stay in the mapped file; a cache is one block
  std::vector<at::Tensor> weights, caches;
  const Json program = Json::parse(map_file(target / "program.json"));
  for (const auto& item : program["inputs"].items()) {
    const Json input{item};
    if (input["kind"].text() == "input") continue;  // made for each pass, below
    const auto dtype = c10::getStringToDtypeMap().at(input["dtype"].text());
    const std::vector<int64_t> shape = input["shape"].integers();
    if (input["kind"].text() == "cache") {
      caches.push_back(at::zeros({1, max_len, shape[0], shape[1]}, dtype));
    } else {
      const auto range = header[input["key"].text()]["data_offsets"].integers();
      const at::Tensor bytes = file.slice(0, data + range[0], data + range[1]);
      weights.push_back(bytes.view(dtype).view(shape));
    }
  }
  std::unordered_map<std::string, at::Tensor> used;  // w0, w1, …, less those that it does not read
  for (const std::string& name : model.get_constant_fqns())
    used[name] = weights.at(std::stoul(name.substr(1)));
  model.load_constants(used, false, /*check_full_update=*/true, /*user_managed=*/true);

  // the first pass reads the prompt, each other one the token before
  for (int64_t start = 0, end = num_prompt; end < max_len; start = end++) {
    const at::Tensor positions = at::arange(start, end);
    std::vector<at::Tensor> pass = {
        at::tensor(c10::ArrayRef(tokens).slice(start)), positions,
        /*q_start=*/at::tensor({int64_t{0}, end - start}, at::kInt),
        /*slot=*/positions.to(at::kInt), /*cache_len=*/at::full({1}, start, at::kInt),
        /*ancestors, none: causal=*/at::empty({end - start, 0}, at::kLong),
        /*block_table=*/at::zeros({1, 1}, at::kInt),
        /*logit_rows=*/at::full({1}, end - start - 1, at::kLong)};
    pass.insert(pass.end(), caches.begin(), caches.end());
    tokens.push_back(model.run(pass)[0].argmax().item<int64_t>());
    std::cout << tokens.back() << (end + 1 < max_len ? ' ' : '\n') << std::flush;
  }
} catch (const std::exception& error) {
  const std::string message = error.what();  // torch's goes on with a stack trace
  std::cerr << "decode: " << message.substr(0, message.find('\n'))
            << "\nusage: decode ENGINE NUM_TOKENS TOKEN_ID...\n";
  return 1;
}
