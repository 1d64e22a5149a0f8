#include "early.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "crc32.h"
#include "engine.h"
#include "io.h"
#include "statistics.h"

namespace zckpt {
EarlyReader::EarlyReader(std::vector<EarlyFile> files, uint64_t window) : files_(std::move(files)), window_(window) {
  uint64_t windows = 0;
  for (const auto& file : files_) windows += (file.size + window - 1) / window;
  crcs_.reserve(windows);
  finite_.reserve(windows);
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {  // nothing is read early
  }
}

void EarlyReader::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void EarlyReader::work() noexcept {
  const Bytes data(static_cast<char*>(std::aligned_alloc(kBlock, kChunk)));
  for (const auto& file : files_)
    for (uint64_t at = 0; at < file.size;) {
      uint32_t crc = 0;
      Statistics numbers;
      for (const uint64_t end = std::min(at + window_, file.size); at < end;) {
        const uint64_t nbytes = std::min(kChunk, end - at);
        if (!data || stop_ || read_all(static_cast<int>(file.fd), data.get(), nbytes, at)) return;
        crc = crc32(crc, data.get(), nbytes);
        count(F32, data.get(), nbytes / sizeof(float), numbers);
        at += nbytes;
      }
      crcs_.push_back(crc);
      finite_.push_back(!numbers.nan && !numbers.inf);
    }
}

}  // namespace zckpt
