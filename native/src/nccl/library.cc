#include "nccl/library.h"

#include <dlfcn.h>

#include <cstddef>
#include <utility>

#include "error.h"

namespace sparkhvd::nccl {

Library::Library(Library&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), name_(std::move(other.name_)) {}

Library& Library::operator=(Library&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(name_, other.name_);
  return *this;
}

Library::~Library() {
  if (handle_ != nullptr) ::dlclose(handle_);
}

Library Library::open(const std::string& name) {
  Library library;
  // RTLD_LOCAL: another NCCL in the process must not use this library's symbols, and this library must not use its
  // symbols.
  library.handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library.handle_ == nullptr) {
    const char* reason = ::dlerror();
    throw Error(SPARKHVD_UNSUPPORTED, reason != nullptr ? reason : name + " cannot be loaded");
  }
  library.name_ = name;
  return library;
}

Library Library::find_loaded(const std::string& soname) noexcept {
  Library library;
  library.handle_ = ::dlopen(soname.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD | RTLD_NODELETE);
  if (library.handle_ != nullptr) {
    library.name_ = soname;
  } else {
    ::dlerror();  // Cleared, so that a later failure does not report this text.
  }
  return library;
}

void* Library::find(const char* symbol) const noexcept {
  return handle_ != nullptr ? ::dlsym(handle_, symbol) : nullptr;
}

std::string Library::file_of(const void* address) const {
  Dl_info info{};
  if (address != nullptr && ::dladdr(address, &info) != 0 && info.dli_fname != nullptr) {
    return info.dli_fname;
  }
  return name_;
}

std::string list_of(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

}  // namespace sparkhvd::nccl
