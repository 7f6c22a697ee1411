#include "engine/difference.h"

#include <algorithm>
#include <cstdio>

#include "collectives/spec.h"
#include "error.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  double parsed = 0;
  // Finds the shortest text that reads back as the same number.
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof(text), "%.*g", digits, value);
    if (std::sscanf(text, "%lf", &parsed) == 1 && parsed == value) break;
  }
  return text;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string side(const Submission& submission, const std::string& value) {
  return "rank " + std::to_string(index_of(submission.rank)) + " sent " + value;
}

std::string disagree(const std::string& name, const Submission& first, const Submission& second,
                     const std::string& what, const std::string& first_value,
                     const std::string& second_value, const std::string& advice) {
  std::string sides = side(first, first_value) + ", " + side(second, second_value) + ". ";
  sides[0] = 'R';
  return operation_label(first.descriptor.collective, name) + ": ranks disagree on " + what + ". " +
         sides + advice;
}

bool shapes_match(Collective collective, const std::vector<std::int64_t>& a,
                  const std::vector<std::int64_t>& b) {
  if (!spec_of(collective).is_uneven) return a == b;
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

const char kBuildSame[] =
    "Build the same model on every rank, or give the two tensors different names.";

}  // namespace

std::optional<std::string> difference(const std::string& name, const Submission& first,
                                      const Submission& second) {
  const Descriptor& a = first.descriptor;
  const Descriptor& b = second.descriptor;
  const auto differ = [&](const std::string& what, const std::string& x, const std::string& y,
                          const std::string& advice) {
    return disagree(name, first, second, what, x, y, advice);
  };
  const char call_same[] = "Make the same call on every rank, or use different names.";
  if (a.collective != b.collective) {
    return differ("the operation", std::string(name_of(a.collective)),
                  std::string(name_of(b.collective)), call_same);
  }
  if (a.is_on_device != b.is_on_device) {
    const auto place = [](const Descriptor& d) {
      return std::string(d.is_on_device ? "tensors on its GPU" : "tensors in CPU memory");
    };
    return differ("where the tensors are", place(a), place(b),
                  "Move them to the same kind of device on every rank.");
  }
  if (a.shapes.size() != b.shapes.size()) {
    return differ("the number of tensors", std::to_string(a.shapes.size()),
                  std::to_string(b.shapes.size()), call_same);
  }
  for (std::size_t i = 0; i < a.shapes.size(); ++i) {
    if (a.dtype == b.dtype && shapes_match(a.collective, a.shapes[i], b.shapes[i])) continue;
    const bool shape_differs = !shapes_match(a.collective, a.shapes[i], b.shapes[i]);
    std::string what = shape_differs ? "shape" : "dtype";
    if (shape_differs && a.shapes[i].size() != b.shapes[i].size())
      what = "the number of dimensions";
    if (a.shapes.size() > 1) what += " of tensor " + std::to_string(i);
    const char any_rows[] =
        "Only the first dimension may differ: give every rank the same number of dimensions and "
        "the "
        "same sizes after the first, or use different names.";
    return differ(what, shape_text(a.shapes[i]) + " " + std::string(name_of(a.dtype)),
                  shape_text(b.shapes[i]) + " " + std::string(name_of(b.dtype)),
                  shape_differs && spec_of(a.collective).is_uneven ? any_rows : kBuildSame);
  }
  if (a.dtype != b.dtype) {
    return differ("dtype", std::string(name_of(a.dtype)), std::string(name_of(b.dtype)),
                  kBuildSame);
  }
  const char* same_numbers = spec_of(a.collective).same_numbers;
  if (same_numbers != nullptr && a.numbers != b.numbers) {
    return differ(same_numbers, numbers_text(a.numbers), numbers_text(b.numbers),
                  "Give the same on every rank.");
  }
  if (a.reduce_op != b.reduce_op) {
    return differ("the reduction", std::string(name_of(a.reduce_op)),
                  std::string(name_of(b.reduce_op)), call_same);
  }
  if (a.root != b.root) {
    return differ("the root rank", std::to_string(index_of(a.root)),
                  std::to_string(index_of(b.root)), call_same);
  }
  if (a.prescale != b.prescale) {
    return differ("prescale_factor", number_text(a.prescale), number_text(b.prescale), call_same);
  }
  if (a.postscale != b.postscale) {
    return differ("postscale_factor", number_text(a.postscale), number_text(b.postscale),
                  call_same);
  }
  return std::nullopt;
}

}  // namespace sparkhvd
