// Reads files from end to end, each byte once, and learns from it what can be learned: CRCs of ranges, what the numbers in
// them are, and whether two places hold the same.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "mover.h"
#include "statistics.h"

namespace zckpt {

// Goes with the move of the same number. The move's source is the first array; its destination the second, if any.
struct Request {
  uint64_t start, pitch;  // number, in its tensor, of its first element; from row to row
  uint8_t how;            // of the flags below
  uint8_t dst_swap, unused[6];
};
static_assert(sizeof(Request) == 24);

constexpr uint8_t kNumbers = 1;   // count the first array
constexpr uint8_t kAgainst = 2;   // compare it with the second
constexpr uint8_t kCrcSource = 4; // the first array's bytes count for the CRCs; it is dense
constexpr uint8_t kCrcOther = 8;  // the second's do; it is dense, in the machine's byte order

struct Scanned {
  Failure failure;
  std::vector<PartialCrc> crcs;
  std::vector<std::pair<uint32_t, Statistics>> statistics;  // by tensor
  std::map<uint32_t, Spread> spreads;                       // of tensors with distances, where they are wanted
};

// `spreads`: whether they are wanted.
Scanned scan(const Batch& batch, const std::vector<Request>& requests, const Relation& relation, bool spreads, const Settings& settings,
             const std::function<bool(uint64_t)>& tick);

}  // namespace zckpt
