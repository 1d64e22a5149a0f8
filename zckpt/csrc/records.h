// Objects of a pickle that are written alike, one after another: read into columns, without an object for each.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace zckpt {

// A piece of how an object is written: bytes that never change, or a value that does.
struct Token {
  enum Kind : int { kLiteral, kNumber, kShape, kGet, kText } kind;
  int column;           // where the value goes; none below zero
  std::string literal;  // of kLiteral; of kShape, what follows the tuple
};

// One way to write an object, and how many objects it puts into the memo.
struct Wording {
  std::vector<Token> tokens;
  uint64_t memoized;
};
using Wordings = std::vector<Wording>;

// What an object said, by column.
struct Said {
  static constexpr int kColumns = 3;
  int64_t numbers[kColumns];
  std::vector<int64_t> shapes[kColumns];
  bool has_shape[kColumns];
  int64_t entries[kColumns];        // of the memo; below zero where there is none
  std::string_view texts[kColumns];
  bool has_text[kColumns];
};

// Reads one object at `at`, in the first of these ways that fits: moves `at`, and returns the way; null if none fits.
// `knows` says whether the memo has an entry.
const Wording* read_object(std::string_view data, size_t& at, const Wordings& ways, Said& said, const std::function<bool(int64_t)>& knows);

// Boxes of a list that is empty before `at`: offsets and then sizes of each, in columns 0 and 1, all of as many dimensions.
// False if it holds anything else; `at` is behind the list then and its objects are counted.
bool read_boxes(std::string_view data, size_t& at, const Wordings& ways, std::vector<int64_t>& numbers, size_t& dims, uint64_t& memoized);

// The memo's numbers that a pickle may still use behind byte `at`, in order, and those of bytes in texts that look so.
std::vector<int64_t> entries_behind(std::string_view data, size_t at);

// What a file of this many bytes must have at its two ends to hold the same tensor as another one; bytes with a mask of 0 may be any.
struct AlikeEnds {
  uint64_t nbytes, behind_at;
  std::string before, before_mask, behind, behind_mask;
};

// Whether the file that begins at `offset` of another one is such a file. False where it cannot be read.
bool is_alike(int fd, uint64_t offset, const AlikeEnds& of, std::vector<char>& buffer);

// Places of chunks: a name's number and the chunk's offsets lead to a file's number, an offset and a length.
class PlaceTable {
 public:
  struct Place {
    int64_t file, offset, length;
  };
  void add(uint32_t name, const std::vector<int64_t>* offsets, const Place& place);
  // The place that was added last; null where there is none.
  const Place* find(uint32_t name, const int64_t* offsets, size_t dims, bool whole);
  // The places of boxes, file, offset and length of each. Empty if a box leaves the tensor, or has no place of its own.
  std::vector<int64_t> find_all(uint32_t name, const std::vector<int64_t>& size, const std::vector<int64_t>& boxes);
  size_t size() const { return rows_.size(); }

 private:
  struct Row {
    uint32_t name, shape;
    int32_t dims;  // below zero for a name alone
    Place place;
  };
  void sort();
  int compare(const Row& row, uint32_t name, const int64_t* offsets, int32_t dims) const;
  const Row* last(uint32_t name, const int64_t* offsets, int32_t dims) const;

  std::vector<Row> rows_;
  std::vector<int64_t> shapes_;
  bool sorted_ = true;
};

}  // namespace zckpt
