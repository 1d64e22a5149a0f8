#include "swapping.h"

#include <algorithm>

#include "io.h"

namespace zckpt {

Swapper::Swapper(unsigned threads, uint64_t block) : block_(block) {
  for (unsigned n = 0; n < threads; ++n) threads_.emplace_back([this] { work(); });
}

Swapper::~Swapper() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  todo_.notify_all();
  for (auto& thread : threads_) thread.join();
}

uint64_t Swapper::begin(int fd, bool write, const std::vector<Stretch>& stretches) {
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = next_++;
    uint64_t count = 0;
    for (const auto& s : stretches)
      for (uint64_t at = 0; at < s.nbytes; at += block_, ++count)
        blocks_.push_back({number, fd, write, {s.address + at, s.offset + at, std::min(block_, s.nbytes - at)}});
    pending_[number] = {count, {0, 0}};
  }
  todo_.notify_all();
  return number;
}

void Swapper::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    todo_.wait(lock, [this] { return closing_ || !blocks_.empty(); });
    if (blocks_.empty()) return;
    const Block block = blocks_.front();
    blocks_.pop_front();
    lock.unlock();
    auto* memory = reinterpret_cast<char*>(block.stretch.address);  // NOLINT
    const int error = block.write ? write_all(block.fd, memory, block.stretch.nbytes, block.stretch.offset)
                                  : read_all(block.fd, memory, block.stretch.nbytes, block.stretch.offset);
    lock.lock();
    auto& pending = pending_[block.number];
    if (error && !pending.outcome.error) pending.outcome = {error, block.stretch.offset};
    if (!--pending.left) done_.notify_all();
  }
}

Swapper::Outcome Swapper::wait(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto found = pending_.find(number);
  if (found == pending_.end()) return {0, 0};
  done_.wait(lock, [&] { return !found->second.left; });
  const Outcome outcome = found->second.outcome;
  pending_.erase(found);
  return outcome;
}

}  // namespace zckpt
