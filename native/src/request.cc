#include "request.h"

#include <bit>
#include <cmath>
#include <vector>

#include "collectives/spec.h"
#include "nccl/calls.h"
#include "point_to_point/matching.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::shared_ptr<const std::vector<Rank>> members_of(const Engine& engine, std::int32_t process_set,
                                                    const std::string& label) {
  try {
    return engine.members(process_set);
  } catch (const Error& error) {
    throw Error(error.status(), label + ": " + error.what());
  }
}

/// Checks a caller's request and copies it into an Operation. Every method throws the error that it finds.
class RequestReader {
 public:
  RequestReader(const sparkhvd_request& raw, const Engine& engine, Operation& operation)
      : raw_(raw),
        engine_(engine),
        operation_(operation),
        descriptor_(operation.descriptor),
        label_(operation.label()),
        spec_(spec_of(operation.descriptor.collective)),
        members_(members_of(engine, raw.process_set, label_)) {}

  void read() {
    read_options();
    if (spec_.reduces) read_reduction();
    if (spec_.has_root) read_root("root_rank");
    if (spec_.is_point_to_point) read_peer();
    read_tensors();
    read_numbers();
    check_message_size();
    record_ready();
  }

 private:
  [[noreturn]] void refuse(const std::string& text) const { invalid(label_ + ": " + text); }

  void read_options() {
    if (operation_.name.empty() || operation_.name.size() > kMaxNameBytes) {
      refuse("the name has " + std::to_string(operation_.name.size()) +
             " bytes; it must have 1 to " + std::to_string(kMaxNameBytes) + ".");
    }
    if (raw_.device != SPARKHVD_DEVICE_CPU) read_device();
    if (spec_.max_tensors > 0) {
      const auto dtype = to_dtype(raw_.dtype);
      if (!dtype) refuse("dtype " + std::to_string(raw_.dtype) + " does not exist.");
      descriptor_.dtype = *dtype;
    }
    const double timeout_s = raw_.timeout_s < 0 ? engine_.stall_shutdown_s() : raw_.timeout_s;
    if (std::isnan(timeout_s)) refuse("timeout_s is not a number.");
    descriptor_.timeout_s = timeout_s;
  }

  void read_device() {
    const auto device = engine_.device();
    if (!device || device->ordinal() != raw_.device) {
      refuse("device " + std::to_string(raw_.device) + " is not open on " +
             rank_text(engine_.rank()) +
             (device ? ", which has opened device " + std::to_string(device->ordinal()) : "") +
             ". Open it first, or move the tensor to the CPU.");
    }
    if (*spec_.device_algorithm == '\0') {
      refuse(spec_.max_tensors == 0
                 ? "it takes no device: it has no tensors. Leave the device at -1, the CPU."
                 : "no device runs it. Move the tensor to the CPU, and leave the device at -1.");
    }
    operation_.on_device = std::make_shared<nccl::OnDevice>(device);
    descriptor_.is_on_device = true;
  }

  void check_device_reduction() const {
    const char fix[] = " Scale with tensor operations, and reduce with Sum.";
    if (!nccl::nccl_op(descriptor_.reduce_op, descriptor_.dtype)) {
      refuse("on a device there is no " + std::string(name_of(descriptor_.reduce_op)) + "." + fix);
    }
    if (raw_.prescale != 1 || raw_.postscale != 1) {
      refuse(std::string("on a device prescale and postscale must be 1.") + fix);
    }
    if (!nccl::nccl_type(descriptor_.dtype)) {
      refuse("NCCL does not reduce " + std::string(name_of(descriptor_.dtype)) +
             ". Convert the tensor to int32.");
    }
  }

  /// Records an event on the caller's stream: the operation waits for the work up to here, and for no later work.
  void record_ready() {
    if (!operation_.on_device || spec_.max_tensors == 0) return;
    auto& on_device = *operation_.on_device;
    const nccl::Device& device = *on_device.device;
    const auto stream = reinterpret_cast<nccl::CUstream>(raw_.stream);
    const nccl::CurrentContext current(device.cuda(), device.context());
    device.refuse_capture(stream, label_);
    on_device.ready = nccl::Event(on_device.device);
    device.cuda().check(device.cuda().cuEventRecord(on_device.ready.get(), stream),
                        "cuEventRecord");
  }

  void read_reduction() {
    const auto op = to_reduce_op(raw_.reduce_op);
    if (!op) refuse("reduce_op " + std::to_string(raw_.reduce_op) + " does not exist.");
    descriptor_.reduce_op = *op;
    if (std::isnan(raw_.prescale) || std::isnan(raw_.postscale)) {
      refuse("prescale and postscale must be numbers, and one is NaN.");
    }
    descriptor_.prescale = raw_.prescale;
    descriptor_.postscale = raw_.postscale;
    if (descriptor_.dtype == DType::kBool) {
      if (*op == ReduceOp::kAverage) {
        refuse("there is no Average of bool. Use Sum or Max for \"or\", or convert the tensor.");
      }
      if (raw_.prescale != 1 || raw_.postscale != 1) {
        refuse("bool cannot be scaled. Leave prescale and postscale at 1.");
      }
    }
    if (operation_.on_device) return check_device_reduction();
    if (*op == ReduceOp::kAdasum) check_adasum();
    if (is_of_bits(*op)) check_bits();
  }

  void check_bits() const {
    if (is_float(descriptor_.dtype)) {
      refuse(std::string(name_of(descriptor_.reduce_op)) + " is for integers and bool, not " +
             std::string(name_of(descriptor_.dtype)) + ".");
    }
    if (raw_.prescale != 1 || raw_.postscale != 1) {
      refuse("bits cannot be scaled. Leave prescale and postscale at 1.");
    }
  }

  void check_adasum() const {
    if (descriptor_.collective != Collective::kAllreduce) {
      refuse("Adasum is for allreduce only. Use Sum or Average.");
    }
    if (!is_float(descriptor_.dtype)) {
      refuse("Adasum needs floating-point tensors, not " + std::string(name_of(descriptor_.dtype)) +
             ". Use Sum or Average.");
    }
    if (!std::has_single_bit(members_->size())) {
      refuse("Adasum combines ranks in pairs and needs 1, 2, 4, 8, ... ranks, not " +
             std::to_string(members_->size()) +
             ". Use Sum or Average, or another number of ranks.");
    }
  }

  void read_peer() {
    const bool takes_any = descriptor_.collective == Collective::kReceive;
    if (takes_any && raw_.root_rank == index_of(kAnyRank)) {
      descriptor_.root = kAnyRank;
    } else {
      read_root("rank");
    }
  }

  void read_root(const char* what) {
    const auto root = Rank{raw_.root_rank};
    if (std::ranges::count(*members_, root) == 0) {
      refuse(std::string(what) + " " + std::to_string(raw_.root_rank) +
             " is not in the process set, which has " + rank_list(*members_) +
             ". It is a global rank.");
    }
    descriptor_.root = root;
  }

  void read_tensors() {
    if (raw_.num_tensors < spec_.min_tensors || raw_.num_tensors > spec_.max_tensors) {
      refuse("num_tensors is " + std::to_string(raw_.num_tensors) + ", but must be " +
             (spec_.max_tensors > spec_.min_tensors ? "at least " : "") +
             std::to_string(spec_.min_tensors) + ".");
    }
    if (raw_.num_tensors > 0 && raw_.tensors == nullptr) refuse("tensors is NULL.");
    for (std::uint32_t i = 0; i < raw_.num_tensors; ++i) read_tensor(i);
  }

  void read_tensor(std::uint32_t i) {
    const sparkhvd_tensor& tensor = raw_.tensors[i];
    const std::string which = label_ + ": tensor " + std::to_string(i);
    if (tensor.num_dims > kMaxDims) {
      invalid(which + " has more than " + std::to_string(kMaxDims) + " dimensions.");
    }
    if (tensor.num_dims > 0 && tensor.shape == nullptr) invalid(which + " has no shape.");
    std::vector<std::int64_t> shape;
    if (tensor.num_dims > 0) shape.assign(tensor.shape, tensor.shape + tensor.num_dims);
    const auto count = count_elements(shape, descriptor_.dtype);
    if (!count) invalid(which + " has an impossible shape (negative or larger than 64 TiB).");
    const std::size_t element = element_size(descriptor_.dtype);
    const std::uint64_t bytes = *count * element;
    total_ += bytes;
    if (total_ > kMaxTensorBytes) refuse("more than 64 TiB.");
    if (bytes > 0 && tensor.input == nullptr && spec_.result != Result::kReceived) {
      invalid(which + " has no input.");
    }
    if (operation_.on_device) {
      operation_.on_device->tensors.push_back(
          {static_cast<const std::byte*>(tensor.input), static_cast<std::byte*>(tensor.output)});
    }
    if (spec_.divides_rows && shape.empty()) {
      invalid(which + " is a scalar, and " + std::string(name_of(descriptor_.collective)) +
              " divides the first dimension. Pass a tensor with at least one dimension.");
    }
    add_pieces(tensor, shape, bytes, which);
    descriptor_.shapes.push_back(std::move(shape));
  }

  void add_pieces(const sparkhvd_tensor& tensor, const std::vector<std::int64_t>& shape,
                  std::uint64_t bytes, const std::string& which) {
    const auto need_output = [&](std::uint64_t size) {
      if (size > 0 && tensor.output == nullptr) invalid(which + " has no output.");
    };
    switch (spec_.result) {
      case Result::kInPlace:
        need_output(bytes);
        if (tensor.input != tensor.output) {
          invalid(which + " has an output that is not its input; " +
                  std::string(name_of(descriptor_.collective)) + " works in place.");
        }
        break;
      case Result::kSameShape:
        need_output(bytes);
        break;
      case Result::kOwnRows: {
        const std::uint64_t own =
            own_rows(shape[0]) * (shape[0] > 0 ? bytes / static_cast<std::uint64_t>(shape[0]) : 0);
        need_output(own);
        operation_.results.add(tensor.output, tensor.output, own);
        return operation_.pieces.add(tensor.input, nullptr, bytes);
      }
      case Result::kOfRoot:
        if (descriptor_.root != engine_.rank()) {
          return operation_.pieces.add(tensor.input, nullptr, bytes);
        }
        need_output(bytes);
        break;
      case Result::kReceived:
        need_output(bytes);
        return operation_.pieces.add(tensor.output, tensor.output, bytes);
      case Result::kAgreed:
        read_room(tensor, which);
        break;
      case Result::kNone:
        break;
    }
    operation_.pieces.add(tensor.input, tensor.output, bytes);
  }

  /// Reads the caller's memory for a result whose size the negotiation determines.
  void read_room(const sparkhvd_tensor& tensor, const std::string& which) {
    if (operation_.on_device) return;
    if ((tensor.output == nullptr) != operation_.outputs.empty() && !descriptor_.shapes.empty()) {
      invalid(which + " has " + (tensor.output == nullptr ? "no" : "an") +
              " output, unlike the tensors before it. Give one for all of them or for none.");
    }
    if (tensor.output == nullptr) return;
    if (tensor.output_bytes > kMaxTensorBytes) invalid(which + " has more than 64 TiB of output.");
    operation_.outputs.push_back(static_cast<std::byte*>(tensor.output));
    descriptor_.room.push_back(static_cast<std::int64_t>(tensor.output_bytes));
  }

  /// Number of this rank's rows of `rows`. The first `rows % size` ranks get an additional row.
  std::uint64_t own_rows(std::int64_t rows) const {
    const auto place = std::ranges::find(*members_, engine_.rank()) - members_->begin();
    const auto size = static_cast<std::int64_t>(members_->size());
    return static_cast<std::uint64_t>(rows / size + (place < rows % size ? 1 : 0));
  }

  void read_numbers() {
    if (raw_.num_splits > 0 && raw_.splits == nullptr) refuse("splits is NULL.");
    auto& numbers = descriptor_.numbers;
    if (raw_.num_splits > 0) numbers.assign(raw_.splits, raw_.splits + raw_.num_splits);
    const auto& options = engine_.world_options();
    spec_.check({.descriptor = descriptor_,
                 .process_set = raw_.process_set,
                 .members = *members_,
                 .self = engine_.rank(),
                 .world_size = engine_.size(),
                 .slot_bytes = options.slot_bytes,
                 .streams = options.streams,
                 .has_numbers = raw_.splits != nullptr,
                 .label = label_});
  }

  /// Refuses a request with a description, or an order, that is too large for a control frame.
  void check_message_size() const {
    std::size_t bytes =
        operation_.name.size() + 1024 + 8 * (descriptor_.numbers.size() + descriptor_.room.size());
    for (const auto& shape : descriptor_.shapes) bytes += 4 + 8 * shape.size();
    std::size_t answer = 32 * members_->size() + bytes;
    if (spec_.count_rows != nullptr) {
      answer += 8 * spec_.count_rows(descriptor_, members_->size());
    }
    if (std::max(bytes, answer) <= kMaxControlBytes) return;
    refuse("the description of " + std::to_string(descriptor_.shapes.size()) + " tensors needs " +
           std::to_string(std::max(bytes, answer)) + " bytes, more than the limit of " +
           std::to_string(kMaxControlBytes) + ". Submit fewer tensors at once.");
  }

  const sparkhvd_request& raw_;
  const Engine& engine_;
  Operation& operation_;
  Descriptor& descriptor_;
  const std::string label_;
  const CollectiveSpec& spec_;
  const std::shared_ptr<const std::vector<Rank>> members_;
  std::uint64_t total_ = 0;
};

}  // namespace

std::shared_ptr<Operation> read_request(const sparkhvd_request* given, const Engine& engine) {
  sparkhvd_request defaults{};
  defaults.prescale = 1;
  defaults.postscale = 1;
  defaults.device = SPARKHVD_DEVICE_CPU;
  defaults.timeout_s = -1;
  const auto raw = read_struct(given, defaults, "request");
  const auto collective = to_collective(raw.collective);
  if (!collective) invalid("collective " + std::to_string(raw.collective) + " does not exist.");
  if (raw.name == nullptr) invalid(std::string(name_of(*collective)) + ": the name is NULL.");
  auto operation = std::make_shared<Operation>();
  operation->process_set = raw.process_set;
  // A rank can join only once, so every join has the same name on all ranks.
  operation->name = *collective == Collective::kJoin ? "join" : raw.name;
  operation->descriptor.collective = *collective;
  RequestReader(raw, engine, *operation).read();
  return operation;
}

}  // namespace sparkhvd
