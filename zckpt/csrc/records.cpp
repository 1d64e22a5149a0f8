#include "records.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <unordered_set>

#include "io.h"

namespace zckpt {

namespace {

constexpr size_t kMostDims = 16;
constexpr uint64_t kReadWhole = 1 << 13;  // a file of so few bytes is read at once, with what is between its ends

uint64_t little(std::string_view data, size_t at, size_t nbytes) {
  uint64_t value = 0;
  for (size_t n = 0; n < nbytes; ++n) value |= uint64_t{static_cast<uint8_t>(data[at + n])} << (8 * n);
  return value;
}

constexpr auto kFrame = static_cast<char>(0x95);
constexpr size_t kFrameBytes = 9;

// A frame of the pickle may begin before any opcode.
void skip_frames(std::string_view data, size_t& at) {
  while (at < data.size() && data[at] == kFrame && data.size() - at >= kFrameBytes && little(data, at + 1, 8) <= data.size() - at - kFrameBytes)
    at += kFrameBytes;
}

// A whole number from 0 to 2^63 - 1, as Python pickles it.
bool read_number(std::string_view data, size_t& at, int64_t& value) {
  skip_frames(data, at);
  if (at >= data.size()) return false;
  const auto code = static_cast<uint8_t>(data[at]);
  size_t nbytes = 0, skip = 1;
  if (code == 'K') nbytes = 1;
  else if (code == 'M') nbytes = 2;
  else if (code == 'J') nbytes = 4;
  else if (code == 0x8a && at + 1 < data.size()) {
    nbytes = static_cast<uint8_t>(data[at + 1]);
    skip = 2;
    if (nbytes < 5 || nbytes > 8) return false;
  } else return false;
  if (data.size() - at < skip + nbytes) return false;
  const uint64_t found = little(data, at + skip, nbytes);
  if ((code == 'J' || skip == 2) && (static_cast<uint8_t>(data[at + skip + nbytes - 1]) & 0x80)) return false;  // below zero
  value = static_cast<int64_t>(found);
  at += skip + nbytes;
  return true;
}

bool read_shape(std::string_view data, size_t& at, std::vector<int64_t>& shape) {
  shape.clear();
  skip_frames(data, at);
  const bool marked = at < data.size() && data[at] == '(';
  at += marked;
  int64_t extent;
  while (read_number(data, at, extent)) {
    shape.push_back(extent);
    if (shape.size() > kMostDims) return false;
  }
  skip_frames(data, at);
  if (at >= data.size() || shape.empty()) return false;
  const auto end = static_cast<uint8_t>(data[at++]);
  if (end == 't') return marked;
  return !marked && end >= 0x85 && end <= 0x87 && shape.size() == end - 0x84u;
}

bool read_entry(std::string_view data, size_t& at, int64_t& number) {
  skip_frames(data, at);
  if (at + 2 <= data.size() && data[at] == 'h') {
    number = static_cast<uint8_t>(data[at + 1]);
    at += 2;
    return true;
  }
  if (at + 5 <= data.size() && data[at] == 'j') {
    number = static_cast<int64_t>(little(data, at + 1, 4));
    at += 5;
    return true;
  }
  return false;
}

// Opcodes that are always the same; only those that get an entry of the memo have an argument.
bool read_opcodes(std::string_view data, size_t& at, const std::string& opcodes) {
  if (data.compare(at, opcodes.size(), opcodes) == 0) {
    at += opcodes.size();
    return true;
  }
  size_t end = at;
  for (size_t n = 0; n < opcodes.size();) {
    const size_t nbytes = std::min(opcodes[n] == 'h' ? size_t{2} : opcodes[n] == 'j' ? size_t{5} : size_t{1}, opcodes.size() - n);
    skip_frames(data, end);
    if (end > data.size() || data.compare(end, nbytes, opcodes, n, nbytes) != 0) return false;
    end += nbytes;
    n += nbytes;
  }
  at = end;
  return true;
}

bool read_in(std::string_view data, size_t& at, const Wording& way, Said& said, const std::function<bool(int64_t)>& knows) {
  for (int n = 0; n < Said::kColumns; ++n) {
    said.numbers[n] = said.entries[n] = -1;
    said.has_shape[n] = said.has_text[n] = false;
  }
  std::vector<int64_t> dropped;
  for (const auto& token : way.tokens) {
    if (at > data.size()) return false;
    const int to = token.column;
    switch (token.kind) {
      case Token::kLiteral:
        if (!read_opcodes(data, at, token.literal)) return false;
        break;
      case Token::kNumber: {
        int64_t value;
        if (!read_number(data, at, value)) return false;
        if (to >= 0) said.numbers[to] = value;
        break;
      }
      case Token::kShape:
        if (!read_shape(data, at, to >= 0 ? said.shapes[to] : dropped) || !read_opcodes(data, at, token.literal)) return false;
        if (to >= 0) said.has_shape[to] = true;
        break;
      case Token::kGet: {
        int64_t number;
        if (!read_entry(data, at, number) || !knows(number)) return false;
        if (to >= 0) said.entries[to] = number;
        break;
      }
      case Token::kText: {
        if (at >= data.size()) return false;
        const size_t length = static_cast<uint8_t>(data[at]);
        if (data.size() - at - 1 < length) return false;
        const std::string_view text = data.substr(at + 1, length);
        if (std::any_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) > 0x7f; })) return false;
        at += 1 + length;
        if (to >= 0) said.has_text[to] = true, said.texts[to] = text;
        break;
      }
    }
  }
  return true;
}

}  // namespace

const Wording* read_object(std::string_view data, size_t& at, const Wordings& ways, Said& said, const std::function<bool(int64_t)>& knows) {
  for (const auto& way : ways) {
    size_t end = at;
    if (read_in(data, end, way, said, knows)) {
      at = end;
      return &way;
    }
  }
  return nullptr;
}

bool read_boxes(std::string_view data, size_t& at, const Wordings& ways, std::vector<int64_t>& numbers, size_t& dims, uint64_t& memoized) {
  Said said;
  const auto knows = [](int64_t) { return false; };
  const auto is = [&](char code) {
    skip_frames(data, at);
    return at < data.size() && data[at] == code;
  };
  dims = 0;
  if (!is('(')) return false;
  while (is('(')) {
    ++at;
    while (!is('e')) {
      const Wording* way = read_object(data, at, ways, said, knows);
      if (!way || !said.has_shape[0] || !said.has_shape[1] || said.shapes[0].size() != said.shapes[1].size()) return false;
      if (dims && said.shapes[0].size() != dims) return false;
      dims = said.shapes[0].size();
      for (int part = 0; part < 2; ++part) numbers.insert(numbers.end(), said.shapes[part].begin(), said.shapes[part].end());
      memoized += way->memoized;
    }
    ++at;
  }
  return dims != 0;
}

std::vector<int64_t> entries_behind(std::string_view data, size_t at) {
  std::unordered_set<int64_t> found;
  for (size_t n = at; n + 1 < data.size(); ++n) {
    if (data[n] == 'j' && n + 5 <= data.size()) {
      found.insert(static_cast<int64_t>(little(data, n + 1, 4)));
    } else if (data[n] == 'g') {
      int64_t number = 0;
      size_t end = n + 1;
      for (; end < data.size() && end <= n + 10 && data[end] >= '0' && data[end] <= '9'; ++end) number = 10 * number + (data[end] - '0');
      if (end > n + 1 && end < data.size() && data[end] == '\n') found.insert(number);
    }
  }
  std::vector<int64_t> sorted(found.begin(), found.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

bool is_alike(int fd, uint64_t offset, const AlikeEnds& of, std::vector<char>& buffer) {
  const auto fits = [](const char* data, const std::string& part, const std::string& mask) {
    unsigned char other = 0;
    for (size_t n = 0; n < part.size(); ++n) other |= static_cast<unsigned char>((data[n] ^ part[n]) & mask[n]);
    return !other;
  };
  if (of.nbytes <= kReadWhole && of.before.size() <= of.nbytes && of.behind_at + of.behind.size() <= of.nbytes) {
    buffer.resize(of.nbytes);
    if (read_all(fd, buffer.data(), buffer.size(), offset)) return false;
    return fits(buffer.data(), of.before, of.before_mask) && fits(buffer.data() + of.behind_at, of.behind, of.behind_mask);
  }
  for (const auto& [at, part, mask] : {std::tuple(uint64_t{0}, &of.before, &of.before_mask), std::tuple(of.behind_at, &of.behind, &of.behind_mask)}) {
    buffer.resize(part->size());
    if (read_all(fd, buffer.data(), buffer.size(), offset + at) || !fits(buffer.data(), *part, *mask)) return false;
  }
  return true;
}

void PlaceTable::add(uint32_t name, const std::vector<int64_t>* offsets, const Place& place) {
  if (shapes_.size() > std::numeric_limits<uint32_t>::max() - 256) throw std::length_error("too many chunks");
  const auto at = static_cast<uint32_t>(shapes_.size());
  if (offsets) shapes_.insert(shapes_.end(), offsets->begin(), offsets->end());
  rows_.push_back({name, at, offsets ? static_cast<int32_t>(offsets->size()) : -1, place});
  sorted_ = false;
}

int PlaceTable::compare(const Row& row, uint32_t name, const int64_t* offsets, int32_t dims) const {
  if (row.name != name) return row.name < name ? -1 : 1;
  if (row.dims != dims) return row.dims < dims ? -1 : 1;
  for (int32_t n = 0; n < dims; ++n)
    if (const int64_t own = shapes_[row.shape + n]; own != offsets[n]) return own < offsets[n] ? -1 : 1;
  return 0;
}

void PlaceTable::sort() {
  if (sorted_) return;
  std::stable_sort(rows_.begin(), rows_.end(), [this](const Row& a, const Row& b) { return compare(a, b.name, shapes_.data() + b.shape, b.dims) < 0; });
  sorted_ = true;
}

const PlaceTable::Row* PlaceTable::last(uint32_t name, const int64_t* offsets, int32_t dims) const {
  const auto end = std::partition_point(rows_.begin(), rows_.end(), [&](const Row& row) { return compare(row, name, offsets, dims) <= 0; });
  return end != rows_.begin() && !compare(*(end - 1), name, offsets, dims) ? &*(end - 1) : nullptr;
}

const PlaceTable::Place* PlaceTable::find(uint32_t name, const int64_t* offsets, size_t dims, bool whole) {
  sort();
  const Row* row = last(name, offsets, whole ? -1 : static_cast<int32_t>(dims));
  return row ? &row->place : nullptr;
}

std::vector<int64_t> PlaceTable::find_all(uint32_t name, const std::vector<int64_t>& size, const std::vector<int64_t>& boxes) {
  sort();
  const size_t dims = size.size();
  std::vector<int64_t> found;
  if (!dims || boxes.size() % (2 * dims)) return found;
  std::vector<const Row*> taken;
  found.reserve(boxes.size() / (2 * dims) * 3);
  for (size_t at = 0; at < boxes.size(); at += 2 * dims) {
    for (size_t n = 0; n < dims; ++n)
      if (static_cast<uint64_t>(boxes[at + n]) + static_cast<uint64_t>(boxes[at + dims + n]) > static_cast<uint64_t>(size[n])) return {};
    const Row* row = last(name, boxes.data() + at, static_cast<int32_t>(dims));
    if (!row) return {};
    taken.push_back(row);
    found.insert(found.end(), {row->place.file, row->place.offset, row->place.length});
  }
  std::sort(taken.begin(), taken.end());
  if (std::adjacent_find(taken.begin(), taken.end()) != taken.end()) return {};
  return found;
}

}  // namespace zckpt
