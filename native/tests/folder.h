// A temporary folder that takes the place of /proc and /sys in tests.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "control_groups.h"
#include "test.h"

namespace sparkhvd::test {

class Folder {
 public:
  Folder() {
    std::string name = "/tmp/sparkhvd-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw Failure("mkdtemp");
    path_ = name;
  }
  Folder(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    const auto path = path_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string at(const std::string& file) const { return (path_ / file).string(); }
  GroupFiles control() const { return {at("groups"), at("v2"), at("v1")}; }

 private:
  std::filesystem::path path_;
};

}  // namespace sparkhvd::test
