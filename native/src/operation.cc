#include "operation.h"

#include "text.h"

namespace sparkhvd {

std::string Operation::label() const { return operation_label(descriptor.collective, name); }

}  // namespace sparkhvd
