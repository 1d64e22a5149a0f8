// Reads files on a thread of its own, before it is known what they hold: the CRC of each window, and whether its numbers would
// all be finite as fp32. Whatever goes wrong ends it early: who reads the rest finds out what it is.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace zckpt {

struct EarlyFile {  // packed by zckpt/engine/early.py
  int64_t fd;
  uint64_t size;
};
static_assert(sizeof(EarlyFile) == 16);

class EarlyReader {
 public:
  // Begins at once, with the first file. They have to stay open until `stop`.
  explicit EarlyReader(std::vector<EarlyFile> files, uint64_t window);
  ~EarlyReader() { stop(); }
  EarlyReader(const EarlyReader&) = delete;
  EarlyReader& operator=(const EarlyReader&) = delete;

  void stop();  // after the window that is being read

  // After `stop`, window by window and file after file: as far as it came.
  const std::vector<uint32_t>& crcs() const { return crcs_; }
  const std::vector<uint8_t>& finite() const { return finite_; }

 private:
  void work() noexcept;

  const std::vector<EarlyFile> files_;
  const uint64_t window_;
  std::vector<uint32_t> crcs_;
  std::vector<uint8_t> finite_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace zckpt
