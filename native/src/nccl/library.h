// Shared libraries that are loaded at run time, because sparkhvd is not linked to CUDA or NCCL.
#pragma once

#include <span>
#include <string>

namespace sparkhvd::nccl {

/// An opened shared library. The destructor only releases the handle. The library stays loaded, because libnccl and
/// libcuda have threads and exit handlers.
class Library {
 public:
  Library() noexcept = default;
  Library(Library&& other) noexcept;
  Library& operator=(Library&& other) noexcept;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library();

  /// Opens `name` (a path, or a soname that the loader searches); throws with the loader's message.
  static Library open(const std::string& name);

  /// The library of this soname that the process has already loaded, if any.
  static Library find_loaded(const std::string& soname) noexcept;

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /// The address of `symbol`; null if the library lacks it.
  void* find(const char* symbol) const noexcept;

  /// The name with which it was opened.
  const std::string& name() const noexcept { return name_; }

  /// The library's file, found by the address of a symbol; the library's name if the loader does not know the file.
  std::string file_of(const void* address) const;

 private:
  void* handle_ = nullptr;
  std::string name_;
};

/// Sets the function pointer `function` to `library`'s `symbol`; returns whether it exists.
template <class Function>
bool bind(const Library& library, const char* symbol, Function*& function) noexcept {
  function = reinterpret_cast<Function*>(library.find(symbol));
  return function != nullptr;
}

/// "a, b and c" for messages.
std::string list_of(std::span<const std::string> words);

}  // namespace sparkhvd::nccl
