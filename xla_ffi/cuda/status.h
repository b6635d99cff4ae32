// The outcome of a step: fine, or a code and a sentence that reaches the user.

#ifndef SKIPREDUCE_CUDA_STATUS_H_
#define SKIPREDUCE_CUDA_STATUS_H_

#include <string>
#include <utility>

namespace skipreduce::cuda {

// The numbers are those of XLA_FFI_Error_Code, so that the handler can pass them on.
enum class Code {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace skipreduce::cuda

#define SKIPREDUCE_RETURN_IF_ERROR(expression)                                   \
  do {                                                                           \
    if (::skipreduce::cuda::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

#endif  // SKIPREDUCE_CUDA_STATUS_H_
