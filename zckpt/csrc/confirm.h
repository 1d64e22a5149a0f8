// Whether the files of an output hold what their sources say; each byte is read once, and takes part in the CRCs on the way.
// Nothing here is what wrote the output: places are found by walking both sides' fragments, not by moves, files are read by a
// reader of its own, and numbers are judged (nearest.h), not cast.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine.h"
#include "nearest.h"

namespace zckpt {

// A fragment as the catalog has it (core/fragments.py): `rows` runs of `count` elements, `pitch` apart in the tensor from `start`
// on; in the store `store_pitch` apart, their elements `step`. All but `offset` are elements. Where `apart` is set, its bytes do not
// take part in CRCs: they are an output's, too, whose windows see to that.
struct Fragment {
  uint32_t store, apart;
  uint64_t offset, start, count, rows, pitch, store_pitch, step;
};
static_assert(sizeof(Fragment) == 64);

// A tensor somewhere: pieces [first, first + pieces), by their start, that cover it once.
struct Side {
  uint32_t first, pieces;
  uint8_t dtype, swap, unused[2];  // swap: bytes of a number that are in foreign order, else 0
};
static_assert(sizeof(Side) == 12);

// Sides [first, first + sides): a source, its output, and copies of the source in other places, which must be the same numbers.
struct Group {
  uint32_t first, sides;
  uint8_t likeness, unused[3];  // of the output
};
static_assert(sizeof(Group) == 12);

// Bytes [begin, end) of an output's file are read and take part in CRCs even where no tensor is.
struct Zone {
  uint32_t store, unused;
  uint64_t begin, end;
};
static_assert(sizeof(Zone) == 24);

struct Confirmed {
  Failure failure;
  std::vector<PartialCrc> crcs;
  struct Found {
    uint32_t side;
    uint64_t count, first;  // elements that are not as they should be; the number of the first of them
  };
  std::vector<Found> found;     // sides with such elements
  std::vector<uint64_t> bytes;  // read of each store
};

struct Confirmation {  // what is to be confirmed
  std::vector<Fragment> pieces;
  std::vector<Side> sides;
  std::vector<Group> groups;
  std::vector<Zone> zones;
};

// `batch` has stores and ranges. An output's pieces are dense in files, and in this machine's byte order; a source's are dense, rows
// of elements that lie together, or of a matrix that lies transposed there; a copy's are single runs.
Confirmed confirm(const Batch& batch, const Confirmation& asked, Settings settings, const std::function<bool(uint64_t)>& tick);

}  // namespace zckpt
