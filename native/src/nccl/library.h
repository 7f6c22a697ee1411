// Shared libraries found at run time: neither CUDA nor NCCL is linked.
#pragma once

#include <span>
#include <string>

namespace sparkhvd::nccl {

/// One opened shared library. It stays loaded permanently, because libnccl and libcuda have threads and
/// exit handlers; destruction only releases the handle.
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

  /// The loaded library of this soname in the process, if any.
  static Library find_loaded(const std::string& soname) noexcept;

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /// The address of `symbol`, or null.
  void* find(const char* symbol) const noexcept;

  /// Name by which it was opened.
  const std::string& name() const noexcept { return name_; }

  /// The file of `address`, one of its symbols; its name if the loader does not know.
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
