// Decodes with an engine's target, without Python and without torch: specc's library of CPU
// operators is all that it takes, by its interface in C (specc.h, specc_programs.h). One sequence,
// greedily, without speculation; EOS does not end it. Weights stay in the mapped file, and nobody
// compares them with their checksums, as `specc run` does.
//
//     SET=$(python -P kernels/library_files.py)  # instructions of this machine, such as avx2
//     g++ -std=c++20 -O1 examples/decode.cpp -o decode -Ikernels/cpu
//         -Lkernels/lib -l:libspecc_cpu-$SET.so -Wl,-rpath,$PWD/kernels/lib
//     ./decode ENGINE NUM_TOKENS TOKEN_ID...
//
// ENGINE is what `specc compile --backend cpu` wrote; TOKEN_ID... is the prompt. Prints token ids.
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "decode/graph.h"

constexpr int64_t kManifest = 6, kInstructions = 1;  // versions that this program reads
// inputs of every program, see passes/program.py
constexpr const char* kInputs[] = {"tokens",    "positions", "q_start",     "slot",
                                   "cache_len", "ancestors", "block_table", "logit_rows"};

int64_t rounded_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// The target's program, with its weights and with caches for one sequence.
class Target {
 public:
  Target(const std::filesystem::path& engine, const Json& manifest, int64_t num_tokens)
      : model_(manifest.list_of("models").at(0)),
        folder_(engine / model_.text_of("dir")),
        weights_(folder_ / "weights.safetensors"),
        block_size_(manifest.get("limits", Kind::kObject).integer_of("block_size")) {
    const int64_t most = std::min(model_.integer_of("max_position"),
                                  manifest.get("limits", Kind::kObject).integer_of("max_seq_len"));
    if (num_tokens > most)
      refuse(std::to_string(num_tokens) + " tokens with the prompt",
             "at most " + std::to_string(most), "ask for fewer, or compile with --max-seq-len");
    if (block_size_ < 1) refuse("blocks of " + std::to_string(block_size_) + " rows", "1 or more");
    for (int64_t i = 0; i < rounded_up(num_tokens, block_size_); ++i)
      blocks_.push_back(static_cast<int32_t>(i));

    const Json program = read_json(folder_ / "program.json");
    const Encoder encoder(program.get("graph", Kind::kObject));
    const std::vector<Json>& inputs = program.list_of("inputs");
    if (static_cast<int64_t>(inputs.size()) != encoder.num_inputs())
      refuse("a graph with other inputs than program.json lists", "the same");
    std::vector<int64_t> given;
    bool takes_mass = false;
    for (size_t slot = 0; slot < inputs.size(); ++slot) {
      if (inputs[slot].text_of("kind") != "input") continue;
      const std::string& name = inputs[slot].text_of("name");
      if (given.size() < std::size(kInputs) ? name != kInputs[given.size()] : name != "mass")
        refuse("the input " + name, "a whole target, which reads tokens");
      takes_mass = name == "mass";
      given.push_back(static_cast<int64_t>(slot));
    }
    program_.reset(specc_program_new(encoder.code(), given.data(),
                                     static_cast<int64_t>(given.size()), encoder.result()));
    done(program_ ? 0 : -1);
    for (size_t slot = 0; slot < inputs.size(); ++slot) {
      const std::string& kind = inputs[slot].text_of("kind");
      if (kind == "input") continue;
      const SpeccTensor bound = kind == "cache" ? cache(inputs[slot]) : weights_[inputs[slot]];
      done(specc_program_bind(program_.get(), static_cast<int64_t>(slot), &bound));
    }
    done(specc_program_flat(program_.get(), takes_mass));
    done(specc_program_watch(program_.get(), weights_.file().data, weights_.file().size));
    pool_.reset(specc_pool_new(0));
    done(pool_ ? 0 : -1);
  }

  // The likeliest token after these, of which the first is the sequence's number `start`.
  int64_t next(std::span<const int64_t> tokens, int64_t start) {
    const int64_t size = model_.integer_of("vocab_size");
    for (const int64_t token : tokens)
      if (token >= size)
        refuse("the token " + std::to_string(token), "one of 0 … " + std::to_string(size - 1),
               "give ids of the engine's tokenizer");
    const auto count = static_cast<int64_t>(tokens.size());
    std::vector<int64_t> positions(count), last{count - 1}, no_words;
    std::iota(positions.begin(), positions.end(), start);
    const std::vector<int32_t> q_start{0, static_cast<int32_t>(count)},
        slot(positions.begin(), positions.end()), cached{static_cast<int32_t>(start)};
    const SpeccTensor inputs[] = {describe(tokens.data(), dtype_named("int64"), {count}),
                                  describe(positions),
                                  describe(q_start),
                                  describe(slot),
                                  describe(cached),
                                  // of width 0: causal
                                  describe(no_words, {count, 0}),
                                  describe(blocks_, {1, static_cast<int64_t>(blocks_.size())}),
                                  describe(last)};
    SpeccTensor logits{}, made[SPECC_MOST_RESULTS]{};
    const Owned<SpeccResult, specc_result_free> result(
        specc_program_run(program_.get(), pool_.get(), inputs, std::size(inputs), &logits));
    done(result ? 0 : -1);
    const SpeccValue arguments[] = {{SPECC_VALUE_TENSOR, 0, 0, &logits},
                                    {SPECC_VALUE_INT, -1, 0, nullptr},   // dim
                                    {SPECC_VALUE_BOOL, 0, 0, nullptr}};  // keepdim
    int64_t num_made = 0;
    done(specc_call("aten::argmax", arguments, std::size(arguments), made, &num_made, nullptr,
                    nullptr));
    const Owned<void, specc_free> memory(made[0].data);
    if (made[0].dim != 1 || made[0].sizes[0] != 1) refuse("logits of several rows", "those of one");
    return *static_cast<const int64_t*>(made[0].data);
  }

 private:
  // Rows of a layer in blocks, zero at first. Where a value is the first columns of its key, both
  // have one memory.
  SpeccTensor cache(const Json& input) {
    std::vector<int64_t> sizes = input.integers_of("shape");
    sizes.insert(sizes.begin(), {static_cast<int64_t>(blocks_.size()), block_size_});
    SpeccTensor made = describe(nullptr, dtype_named(input.text_of("dtype")), sizes);
    const int64_t number = input.integer_of("layer");
    const std::vector<Json>& layers = model_.list_of("layers");
    if (number < 0 || number > static_cast<int64_t>(layers.size()))
      refuse("a cache of layer " + std::to_string(number), "one of the model");
    const bool is_layer = number < static_cast<int64_t>(layers.size());
    const Json* in_keys = is_layer ? layers[number].find("values_in_keys") : nullptr;
    SpeccTensor& keys = keys_[number];
    if (input.text_of("part") == "v" && in_keys != nullptr && in_keys->integer != 0) {
      if (keys.data == nullptr || keys.dim != made.dim) refuse("values before keys", "keys first");
      std::copy_n(keys.strides, keys.dim, made.strides);
      made.data = keys.data, made.bytes = keys.bytes;
      return made;
    }
    made.data = memory_.emplace_back(std::calloc(std::max<int64_t>(made.bytes, 1), 1)).get();
    if (made.data == nullptr) refuse("no memory for caches", "more", "ask for fewer tokens");
    if (input.text_of("part") == "k") keys = made;
    return made;
  }

  const Json model_;
  const std::filesystem::path folder_;
  const Weights weights_;
  const int64_t block_size_;
  std::vector<int32_t> blocks_;  // the sequence's, in their order
  std::map<int64_t, SpeccTensor> keys_;
  std::vector<Owned<void, std::free>> memory_;
  Owned<SpeccPool, specc_pool_free> pool_;
  Owned<SpeccProgram, specc_program_free> program_;
};

// What this program does not read is refused by name.
Json manifest_of(const std::filesystem::path& engine) {
  Json manifest = read_json(engine / "manifest.json");
  const int64_t version = manifest.integer_of("schema_version");
  if (version != kManifest)
    refuse("an engine of schema version " + std::to_string(version), std::to_string(kManifest));
  if (const std::string& backend = manifest.text_of("backend"); backend != "cpu")
    refuse("an engine for the backend " + backend, "cpu", "compile with --backend cpu");
  if (const int64_t found = manifest.integer_of("instructions"); found != kInstructions)
    refuse("an engine of instructions " + std::to_string(found), std::to_string(kInstructions));
  if (manifest.find("parallel") != nullptr || manifest.find("segments") != nullptr)
    refuse("a target cut for ranks or in segments", "one program", "use `specc run`");
  if (manifest.list_of("models").empty()) refuse("an engine without models", "a target");
  return manifest;
}

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int64_t integer(const char* text) {
  int64_t made = 0;
  const char* end = text + std::strlen(text);
  const auto [last, error] = std::from_chars(text, end, made);
  if (error != std::errc() || last != end || made < 0)
    throw UsageError(std::string(text) + " is no number of 0 or more");
  return made;
}

int main(int argc, char** argv) try {
  if (argc < 4) throw UsageError(std::to_string(argc - 1) + " arguments");
  const int64_t num_prompt = argc - 3, wanted = integer(argv[2]);
  std::vector<int64_t> tokens;
  for (int i = 3; i < argc; ++i) tokens.push_back(integer(argv[i]));
  if (specc_interface_version() != SPECC_INTERFACE_VERSION)
    refuse("a library of another version", "that of specc.h", "compile this program again");

  const std::filesystem::path engine = argv[1];
  const int64_t most = num_prompt + std::min<int64_t>(wanted, std::numeric_limits<int32_t>::max());
  Target target(engine, manifest_of(engine), most);
  // the first pass reads the prompt, each other one the token before
  for (int64_t start = 0, end = num_prompt; end < most; start = end++) {
    tokens.push_back(target.next(std::span(tokens).subspan(start), start));
    std::cout << tokens.back() << (end + 1 < most ? ' ' : '\n') << std::flush;
  }
} catch (const UsageError& error) {
  std::cerr << "decode: " << error.what() << "\nusage: decode ENGINE NUM_TOKENS TOKEN_ID...\n";
  return 1;
} catch (const std::exception& error) {
  const std::string what = error.what();
  const bool is_whole = what.starts_with("found:");
  std::cerr << (is_whole ? what : "found:  " + what + "\nneeded: a complete engine\ndo:     " + kAgain)
            << '\n';
  return 1;
}
