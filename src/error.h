// The one exception of the project, and printf-style text for its message.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

// One line: what was wrong, with the numbers, and what to do about it.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The layout can't be. Every rank finds this by itself, before any work, so it is said once and all ranks end.
struct LayoutError : Error {
  using Error::Error;
};

// printf into a string of any length. The attribute lets the compiler check the arguments against `fmt`.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
  std::va_list args, again;
  va_start(args, fmt);
  va_copy(again, args);
  const int length = std::vsnprintf(nullptr, 0, fmt, args);
  va_end(args);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, fmt, again);
  va_end(again);
  return text;
}
