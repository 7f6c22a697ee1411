// Shared libraries that are looked for at run time: nothing of CUDA or NCCL is linked.
#pragma once

#include <span>
#include <string>

namespace sparkhvd::nccl {

/// One opened shared library. It stays in the process for good, because libnccl and libcuda keep
/// threads and exit handlers of their own; destruction only gives back the handle.
class Library {
 public:
  Library() noexcept = default;
  Library(Library&& other) noexcept;
  Library& operator=(Library&& other) noexcept;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library();

  /// Opens `name` (a path, or a soname that the loader searches); throws with the loader's words.
  static Library open(const std::string& name);

  /// The library of this soname that the process has loaded already; empty if there is none.
  static Library find_loaded(const std::string& soname) noexcept;

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /// The address of `symbol`, or null.
  void* find(const char* symbol) const noexcept;

  /// Name by which it was opened.
  const std::string& name() const noexcept { return name_; }

  /// The file that `address`, one of its symbols, lies in; its name where the loader cannot tell.
  std::string file_of(const void* address) const;

 private:
  void* handle_ = nullptr;
  std::string name_;
};

/// Fills the function pointer `function` with `library`'s `symbol`; returns whether it is there.
template <class Function>
bool bind(const Library& library, const char* symbol, Function*& function) noexcept {
  function = reinterpret_cast<Function*>(library.find(symbol));
  return function != nullptr;
}

/// "a, b and c" for messages.
std::string list_of(std::span<const std::string> words);

}  // namespace sparkhvd::nccl
