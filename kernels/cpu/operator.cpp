#include "operator.h"

#include <map>

namespace specc {
namespace {

// built while the library is loaded, by whichever file comes first
std::map<std::string_view, Operator>& table() {
  static std::map<std::string_view, Operator> made;
  return made;
}

}  // namespace

Registration::Registration(const Operator& made) { table().emplace(made.name, made); }

const Operator* find_operator(std::string_view name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : &found->second;
}

std::vector<std::string_view> operator_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, made] : table()) names.push_back(name);
  return names;
}

}  // namespace specc
