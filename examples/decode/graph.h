// A graph of program.json as instructions of the library, for examples/decode.cpp; see
// runtime/backends/cpu/encoder.py, which does the same with torch's schemas.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "files.h"
#include "specc_programs.h"

template <auto kFree>
struct Freed {
  template <class T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};
template <class T, auto kFree>
using Owned = std::unique_ptr<T, Freed<kFree>>;

// What `specc_operator_schema` says: parameters, and how many results there are.
struct Schema {
  struct Parameter {
    std::string type, name;
    const Json* given() const { return has_default ? &preset : nullptr; }
    bool has_default = false;
    Json preset;
  };
  std::vector<Parameter> parameters;
  int64_t num_results = 1;
  bool returns_list = false;  // of as many tensors as the call asks for

  explicit Schema(std::string_view text) {
    const size_t arrow = text.rfind(" -> "), begin = text.find('(') + 1;
    const std::string_view results = text.substr(arrow + 4);
    returns_list = results.ends_with("[]");
    if (results.starts_with('('))
      num_results = results == "()" ? 0 : 1 + std::count(results.begin(), results.end(), ',');
    for (std::string_view rest = text.substr(begin, arrow - 1 - begin); !rest.empty();) {
      const size_t end = std::min(end_of_parameter(rest), rest.size());
      if (const std::string_view one = rest.substr(0, end); one != "*") add(one);
      rest.remove_prefix(std::min(end + 2, rest.size()));
    }
  }

 private:
  // The first comma that stands in no brackets.
  static size_t end_of_parameter(std::string_view text) {
    int depth = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '(' || text[i] == '[') ++depth;
      if (text[i] == ')' || text[i] == ']') --depth;
      if (text[i] == ',' && depth == 0) return i;
    }
    return text.size();
  }
  // "Tensor(a!) self", "SymInt? start=None"
  void add(std::string_view text) {
    Parameter made;
    const size_t equal = text.find('=');
    if (equal != text.npos) {
      made.has_default = true;
      const std::string_view value = text.substr(equal + 1);
      made.preset = Json::parse(value == "None"    ? "null"
                                : value == "True"  ? "true"
                                : value == "False" ? "false"
                                                   : value);
    }
    text = text.substr(0, equal);
    const size_t space = text.rfind(' ');
    made.name = text.substr(space + 1);
    made.type = text.substr(0, space);
    if (const size_t alias = made.type.find('('); alias != std::string::npos)
      made.type.erase(alias, made.type.find(')') + 1 - alias);
    parameters.push_back(made);
  }
};

// A graph of program.json as instructions; its inputs are the first values.
class Encoder {
 public:
  explicit Encoder(const Json& graph) : graph_(graph) {
    std::set<std::string> missing;
    const std::vector<Json>& nodes = graph.list_of("nodes");
    for (const Json& node : nodes) {
      if (node.text_of("op") != "call_function") continue;
      const std::string& target = node.text_of("target");
      if (is_own(target)) continue;
      const char* text = specc_operator_schema(native_name(target).c_str());
      if (text != nullptr && !schemas_.contains(target)) schemas_.emplace(target, Schema(text));
      if (text == nullptr || num_results(node) > SPECC_MOST_RESULTS) missing.insert(target);
    }
    if (!missing.empty()) {
      std::string names;
      for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
      refuse("operators that the library has no kernel for: " + names,
             "a kernel for each: there is no Python here that could call torch's",
             "use `specc run`, or write the kernels (docs/design/cpu.md)");
    }
    int64_t num_slots = 0;
    for (const Json& node : nodes) num_slots += num_results(node);
    code_.reset(specc_code_new(num_slots));
    done(code_ ? 0 : -1);
    encode();
  }
  SpeccCode* code() const { return code_.get(); }
  int64_t num_inputs() const { return num_inputs_; }
  int64_t result() const { return result_; }

 private:
  // What the runner computes with sizes, and parts of values.
  static bool is_own(std::string_view target) {
    return target.starts_with("operator.") || target.starts_with("torch.sym_") ||
           target == "aten.sym_size.int";
  }
  // aten.add.Tensor → aten::add.Tensor, specc.linear.default → specc::linear
  static std::string native_name(std::string name) {
    if (const size_t dot = name.find('.'); dot != name.npos) name.replace(dot, 1, "::");
    if (name.ends_with(".default")) name.resize(name.size() - 8);
    return name;
  }

  // Values that a node makes; of a list, as many as "(float32[1, 4], float32[1, 4])" names.
  int64_t num_results(const Json& node) const {
    if (node.text_of("op") != "call_function") return 1;
    const auto schema = schemas_.find(node.text_of("target"));
    if (schema == schemas_.end()) return 1;
    if (!schema->second.returns_list) return schema->second.num_results;
    const std::string& described = node.text_of("val");
    return std::count(described.begin(), described.end(), '[');
  }

  void encode() {
    for (const Json& node : graph_.list_of("nodes")) {
      const std::string &op = node.text_of("op"), &name = node.text_of("name");
      if (op == "placeholder") {
        if (!stage_is_begun_) done(specc_code_input(code(), next_));
        if (stage_is_begun_) refuse("an input after calls", "inputs first");
        take(name, 1), ++num_inputs_;
        continue;
      }
      if (op != "call_function") refuse("a node " + op, "inputs and calls");
      if (!stage_is_begun_) done(specc_code_stage(code()));
      stage_is_begun_ = true;
      call(node, name);
    }
    if (!stage_is_begun_) refuse("a program without calls", "a model");
    const Json* output = graph_.find("output");
    if (output != nullptr && output->is(Kind::kList) && !output->items.empty())
      output = &output->items[0];
    if (output == nullptr) refuse("a program without a result", "logits");
    result_ = slot_of(*output);
    done(specc_code_keep(code(), result_));
    done(specc_code_finish(code()));
  }

  void call(const Json& node, const std::string& name) {
    static const std::vector<Json> kNone;
    const std::string& target = node.text_of("target");
    const Json *args = node.find("args"), *kwargs = node.find("kwargs");
    const std::vector<Json>& given = args == nullptr ? kNone : args->items;
    if (target == "operator.getitem") {
      const std::vector<int64_t>* parts = given.size() == 2 ? find(given[0]) : nullptr;
      // a part of one tensor would be a row of it
      if (parts == nullptr || parts->size() < 2 || !given[1].is(Kind::kInt) ||
          given[1].integer < 0 || given[1].integer >= static_cast<int64_t>(parts->size()))
        refuse("a part that " + name + " does not have", "one of the results of a call");
      slots_[name] = {(*parts)[given[1].integer]};
    } else if (target == "aten.sym_size.int") {
      if (given.size() != 2 || !given[1].is(Kind::kInt)) refuse("a size of " + name, "a dimension");
      done(specc_code_size(code(), slot_of(given[0]), given[1].integer, take(name, 1)));
    } else if (is_own(target)) {
      const std::string sign = target.substr(target.find_last_of("._") + 1);
      done(specc_code_arithmetic(code(), sign.c_str(), take(name, 1)));
      for (const Json& value : given) argument(value);
    } else {
      operator_call(node, given, kwargs);
    }
  }

  // All arguments of the schema, in its order.
  void operator_call(const Json& node, const std::vector<Json>& given, const Json* named) {
    const std::string &name = node.text_of("name"), &target = node.text_of("target");
    const Schema& schema = schemas_.at(target);
    const int64_t count = num_results(node), first = take(name, count);
    done(specc_code_operator(code(), native_name(target).c_str(), first, count, 0));
    size_t used = std::min(given.size(), schema.parameters.size());
    for (size_t i = 0; i < schema.parameters.size(); ++i) {
      const Schema::Parameter& parameter = schema.parameters[i];
      const Json* value = named == nullptr ? nullptr : named->find(parameter.name);
      if (value != nullptr) ++used;
      if (i < given.size()) value = &given[i];
      if (value == nullptr) value = parameter.given();
      if (value == nullptr)
        refuse(name + " without " + parameter.name, "what " + target + " takes");
      if (parameter.type == "Tensor" && is_number(*value)) {
        scalar(*value);
        continue;
      }
      // one for all dimensions
      if (parameter.type.ends_with(']') && is_one(*value)) done(specc_code_list(code(), 1));
      argument(*value);
    }
    if (used != given.size() + (named == nullptr ? 0 : named->items.size()))
      refuse("arguments of " + name + " that " + target + " does not take", "those of its schema");
  }

  void argument(const Json& value) {
    if (const std::vector<int64_t>* slots = find(value)) {
      if (slots->size() != 1) done(specc_code_list(code(), static_cast<int64_t>(slots->size())));
      for (const int64_t slot : *slots) done(specc_code_slot(code(), slot));
      return;
    }
    const Json& first = value.is(Kind::kObject) && value.items.size() == 1 ? value.items[0] : value;
    const std::string kind = &first == &value ? "" : value.keys[0];
    if (value.is(Kind::kList) || (kind == "tuple" && first.is(Kind::kList))) {
      done(specc_code_list(code(), static_cast<int64_t>(first.items.size())));
      for (const Json& item : first.items) argument(item);
    } else if (value.is(Kind::kNull) || kind == "device" || kind == "layout") {
      done(specc_code_none(code()));
    } else if (kind == "memory_format") {
      // another one than the usual is that of what is copied
      done(first.text == "contiguous_format" ? specc_code_int(code(), 0) : specc_code_none(code()));
    } else if (kind == "dtype") {
      done(specc_code_int(code(), dtype_named(first.text).code));
    } else if (kind == "float") {
      done(specc_code_real(code(), std::stod(first.text)));
    } else if (value.is(Kind::kBool)) {
      done(specc_code_bool(code(), value.integer != 0));
    } else if (value.is(Kind::kInt)) {
      done(specc_code_int(code(), value.integer));
    } else if (value.is(Kind::kReal)) {
      done(specc_code_real(code(), value.real));
    } else if (value.is(Kind::kText)) {
      done(specc_code_text(code(), value.text.c_str()));
    } else {
      refuse("an argument that cannot be read", "numbers, texts, values, and lists of them");
    }
  }

  // A number where an operator takes a tensor.
  void scalar(const Json& value) {
    const float real = static_cast<float>(value.real);
    const bool flag = value.integer != 0;
    const SpeccTensor made =
        value.is(Kind::kReal)   ? describe(&real, dtype_named("float32"), {})
        : value.is(Kind::kBool) ? describe(&flag, dtype_named("bool"), {})
                                : describe(&value.integer, dtype_named("int64"), {});
    done(specc_code_scalar(code(), &made));
  }

  static bool is_number(const Json& value) {
    return value.is(Kind::kBool) || value.is(Kind::kInt) || value.is(Kind::kReal);
  }
  bool is_one(const Json& value) const {
    const std::vector<int64_t>* slots = find(value);
    return slots != nullptr ? slots->size() == 1 : value.is(Kind::kBool) || value.is(Kind::kInt);
  }
  // Slots of {"node": name}, of the parts of its value; null where it is something else.
  const std::vector<int64_t>* find(const Json& value) const {
    const Json* node = value.find("node");
    if (node == nullptr) return nullptr;
    const auto found = slots_.find(node->text);
    if (found == slots_.end()) refuse("a value " + node->text + " that nothing makes", "a graph");
    return &found->second;
  }
  int64_t slot_of(const Json& value) const {
    const std::vector<int64_t>* slots = find(value);
    if (slots == nullptr || slots->size() != 1) refuse("no value, or several", "one value");
    return slots->front();
  }
  int64_t take(const std::string& name, int64_t count) {
    std::vector<int64_t>& slots = slots_[name];
    if (!slots.empty()) refuse("two nodes with the name " + name, "one");
    for (int64_t i = 0; i < count; ++i) slots.push_back(next_++);
    return next_ - count;
  }

  const Json& graph_;
  Owned<SpeccCode, specc_code_free> code_;
  std::map<std::string, Schema, std::less<>> schemas_;
  std::map<std::string, std::vector<int64_t>> slots_;
  int64_t next_ = 0, num_inputs_ = 0, result_ = 0;
  bool stage_is_begun_ = false;
};
