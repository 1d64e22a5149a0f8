// The `.metadata` of torch.distributed.checkpoint, read as columns from one end of the file to the other, without an object for a tensor.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zckpt {

// Tensors that are one chunk each, in the order of the state dict.
struct Described {
  struct Form {
    std::string dtype;  // its name in torch
    std::vector<int64_t> shape;
  };
  std::vector<Form> forms;
  std::vector<std::string> files;
  std::vector<std::string> prefixes;  // all keys of a path but the last, a line each
  std::vector<uint32_t> form, prefix;
  std::vector<int32_t> file;  // below zero where a tensor without elements has no place
  std::vector<int64_t> offset, length;
  std::string version;

  size_t size() const { return ends_.size(); }
  std::string_view name(size_t number) const;
  // The number of the tensor with this name; below zero if there is none.
  int64_t find(std::string_view name) const;
  // The numbers by the names' bytes.
  std::vector<uint32_t> in_order() const;
  // Whether a name has this text in it.
  bool mentions(std::string_view text) const { return names_.find(text) != std::string::npos; }

 private:
  friend class DescribedReader;
  std::string_view named(uint32_t id) const;
  size_t slot(std::string_view name) const;
  std::string names_;  // each behind a zero byte
  std::vector<uint64_t> ends_;
  std::vector<uint32_t> slots_;  // of a table of names: their numbers and 1
  std::vector<uint32_t> order_, places_;  // the tensors' numbers as they were described, and the way back; empty for the same order
};

// Null where the file holds anything else: such a file is read by the machine that says what is wrong.
std::unique_ptr<Described> read_described(int fd, uint64_t nbytes);

}  // namespace zckpt
