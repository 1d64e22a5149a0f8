// A batch of moves: elements from files or memory into files or memory. See the protocol on top of mover.cpp.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "cast.h"

namespace zckpt {

constexpr int64_t kFolded = -2;  // of a store whose fp32 numbers are computed from others while they are read

// Plain structs, packed by zckpt/engine/batches.py with the same field order. Offsets, pitches and steps are bytes.
struct Store {
  int64_t fd;         // -1: memory; kFolded
  int64_t direct_fd;  // -1: none
  uint64_t address;   // of a folded one, the number of its first term
  uint64_t size;      // of a folded one, how many terms it has
};
static_assert(sizeof(Store) == 32);

struct Move {
  uint32_t src, dst;
  uint64_t src_offset, dst_offset, count, rows;
  int64_t src_pitch, dst_pitch, src_step, dst_step;
  uint32_t tensor;
  uint8_t src_dtype, dst_dtype, swap, unused;  // swap: bytes of one number when the source's byte order is foreign, else 0
};
static_assert(sizeof(Move) == 80);

struct Literal {
  uint32_t dst, unused;
  uint64_t offset, length, at;  // `at`: offset in the blob of all literals
};
static_assert(sizeof(Literal) == 32);

struct Range {  // of a file whose CRC is wanted
  uint32_t store, number;
  uint64_t start, length;
};
static_assert(sizeof(Range) == 24);

// What becomes of the numbers so far when the next tensor comes; the order is that of zckpt/core/recipes.py.
enum class Fold : uint32_t { kSet, kAdd, kApproach, kBlend, kDiffer, kLowRank, kFactor };
constexpr uint32_t kFolds = 7;

struct Term {
  uint32_t fold, rank, first, count;  // its pieces
  double a, b;
  uint64_t rows, columns;  // of what a product is added to, as is the rest: of one expert's matrix
  uint32_t experts, turned;
};
static_assert(sizeof(Term) == 56);

struct Piece {  // elements [start, start + count) of a term's tensor, side by side; a term's pieces follow each other from 0 on
  uint32_t store;
  uint8_t dtype, swap;
  uint16_t unused;
  uint64_t start, count, offset;
};
static_assert(sizeof(Piece) == 32);

struct PartialCrc {
  uint32_t number, crc;
  uint64_t offset, length;
};

struct Failure {
  const char* kind = "";  // "read", "write", "cast", "consumer", "kept", "memory", "threads", "engine"; empty: none
  int error = 0;          // of a read or write: errno, or kEndOfFile
  uint32_t store = 0;
  uint64_t offset = 0;
  char text[160] = "";  // of threads that cannot start, and of what nobody foresaw; here, since there may be no memory left
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<char, Free>;

struct Settings {
  unsigned threads;
  uint64_t window;  // bytes of an output file that are gathered and written at once; a multiple of 4096
  bool clamp;
  bool give_back;        // what was read leaves the page cache
  uint64_t bytes_per_s;  // at most so many are read and written, together; 0: no limit
  std::vector<bool> ordered = {};  // stores whose bytes the consumer gets
  bool here = false;               // a single thread, which is the caller's
};

// Gets an output file's bytes in the order of the file, while they are warm, on one thread after the other. They are
// `from` bytes into `buffer`, which is used again afterwards. A consumer that still looks into it takes the buffer and returns
// kKept. Everything but kTaken stops the run.
enum class Handed { kTaken, kRefused, kKept };
using Consumer = std::function<Handed(uint32_t store, uint64_t offset, Bytes& buffer, uint64_t from, uint64_t length)>;

struct Batch {
  std::vector<Store> stores;
  std::vector<Move> moves;
  std::vector<Literal> literals;
  std::vector<Range> ranges;
  const char* blob;
  std::vector<Term> terms = {};
  std::vector<Piece> pieces = {};
};

struct Result {
  Failure failure;
  std::vector<PartialCrc> crcs;
  std::map<uint32_t, Overflow> overflows;
  uint64_t cloned = 0;  // bytes of outputs that share their sources' blocks
};

// Runs on its own threads; `tick` is called on the caller's thread every 50 ms with the bytes written so far, and
// stops everything by returning false.
Result run(const Batch& batch, const Settings& settings, const std::function<bool(uint64_t)>& tick, const Consumer& consumer);

// Frees the buffers that runs have left to the next ones.
void let_go();

}  // namespace zckpt
