// A reader of JSON for examples/decode.cpp: as much as manifests, graphs and headers of safetensors
// files need. What is wrong with a file is an exception that says what and where.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

struct Json {
  enum class Kind { kNull, kBool, kInt, kReal, kText, kList, kObject };

  Kind kind = Kind::kNull;
  int64_t integer = 0;  // also of kBool
  double real = 0;
  std::string text;
  std::vector<std::string> keys;  // of an object, one for each item
  std::vector<Json> items;

  // Throws std::runtime_error: what is no JSON, or nested 100 deep.
  static Json parse(std::string_view text);

  bool is(Kind wanted) const { return kind == wanted; }
  // An item of an object; null where it is none, or has none of that name.
  const Json* find(std::string_view key) const {
    for (size_t i = 0; i < keys.size(); ++i)
      if (keys[i] == key) return &items[i];
    return nullptr;
  }
  // The same, where there has to be one, of this kind.
  const Json& get(std::string_view key, Kind wanted) const {
    const Json* found = find(key);
    if (found == nullptr || !found->is(wanted))
      throw std::runtime_error("no " + std::string(key) + ", or one of another kind");
    return *found;
  }
  const std::string& text_of(std::string_view key) const { return get(key, Kind::kText).text; }
  int64_t integer_of(std::string_view key) const { return get(key, Kind::kInt).integer; }
  const std::vector<Json>& list_of(std::string_view key) const {
    return get(key, Kind::kList).items;
  }
  std::vector<int64_t> integers_of(std::string_view key) const {
    std::vector<int64_t> found;
    for (const Json& item : list_of(key)) {
      if (!item.is(Kind::kInt)) throw std::runtime_error(std::string(key) + " has other items");
      found.push_back(item.integer);
    }
    return found;
  }
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  Json whole() {
    Json made = value(0);
    skip_space();
    if (at_ != text_.size()) fail("something after the end");
    return made;
  }

 private:
  static constexpr int kDeepest = 100;

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("no JSON at byte " + std::to_string(at_) + ": " + what);
  }
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }
  bool takes(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  // After a space.
  bool takes_sign(char sign) {
    skip_space();
    return takes({&sign, 1});
  }

  Json value(int depth) {
    if (depth > kDeepest) fail("nested too deeply");
    if (takes_sign('{')) return list_until('}', depth);
    if (takes_sign('[')) return list_until(']', depth);
    Json made;
    if (takes_sign('"')) {
      made.kind = Json::Kind::kText;
      made.text = string();
    } else if (takes("true") || takes("false")) {
      made.kind = Json::Kind::kBool;
      made.integer = text_[at_ - 2] == 'u';
    } else if (!takes("null")) {
      number(made);
    }
    return made;
  }

  // Items of a list, or of an object, with a key before each.
  Json list_until(char end, int depth) {
    Json made;
    made.kind = end == ']' ? Json::Kind::kList : Json::Kind::kObject;
    if (takes_sign(end)) return made;
    do {
      if (end == '}') {
        if (!takes_sign('"')) fail("a key is a string");
        made.keys.push_back(string());
        if (!takes_sign(':')) fail("no : after a key");
      }
      made.items.push_back(value(depth + 1));
    } while (takes_sign(','));
    if (!takes_sign(end)) fail(std::string("no ") + end);
    return made;
  }

  void number(Json& made) {
    const char *first = text_.data() + at_, *end = text_.data() + text_.size();
    std::string_view word = text_.substr(at_);
    word = word.substr(0, word.find_first_not_of("+-.0123456789eE"));
    const bool is_real = word.find_first_of(".eE") != word.npos;
    const auto [last, error] = is_real ? std::from_chars(first, end, made.real)
                                       : std::from_chars(first, end, made.integer);
    if (word.empty() || error != std::errc() || last != first + word.size())
      fail("no number, or one of more than 64 bits");
    made.kind = is_real ? Json::Kind::kReal : Json::Kind::kInt;
    at_ += word.size();
  }

  // What follows a quote, and the quote after it.
  std::string string() {
    std::string made;
    for (;;) {
      if (at_ == text_.size()) fail("no end of a string");
      const char c = text_[at_++];
      if (c == '"') return made;
      if (c != '\\') {
        made += c;
        continue;
      }
      if (at_ == text_.size()) fail("no end of a string");
      const char sign = text_[at_++];
      const size_t place = std::string_view("\"\\/bfnrt").find(sign);
      if (sign == 'u') put_utf8(made, code_point());
      else if (place == std::string_view::npos) fail("no such escape");
      else made += "\"\\/\b\f\n\r\t"[place];
    }
  }
  uint32_t four_digits() {
    uint32_t code = 0;
    const char* first = text_.data() + at_;
    if (text_.size() - at_ < 4 || std::from_chars(first, first + 4, code, 16).ptr != first + 4)
      fail("no four digits");
    at_ += 4;
    return code;
  }
  uint32_t code_point() {
    const uint32_t code = four_digits();
    if (code < 0xD800 || code > 0xDFFF) return code;
    // beyond 16 bits: two halves
    const uint32_t low = takes("\\u") ? four_digits() : 0;
    if (code > 0xDBFF || low < 0xDC00 || low > 0xDFFF) fail("half of a character");
    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  static void put_utf8(std::string& made, uint32_t code) {
    if (code < 0x80) {
      made += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr int kFirst[] = {0, 0xC0, 0xE0, 0xF0};
    made += static_cast<char>(kFirst[more] | code >> (6 * more));
    for (int i = more - 1; i >= 0; --i) made += static_cast<char>(0x80 | (code >> (6 * i) & 0x3F));
  }

  std::string_view text_;
  size_t at_ = 0;
};

inline Json Json::parse(std::string_view text) { return JsonReader(text).whole(); }
