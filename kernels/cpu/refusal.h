// What is said of a number that would be a read or a write anywhere in memory.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace specc {

[[noreturn]] inline void refuse(const std::string& found, const std::string& needed) {
  throw std::runtime_error("specc: found " + found + ", needed " + needed);
}

inline std::string indexed(const std::string& name, int64_t index, int64_t value) {
  return name + "[" + std::to_string(index) + "] = " + std::to_string(value);
}

inline std::string up_to(int64_t last) { return "0 … " + std::to_string(last); }

}  // namespace specc
