// CRC-32 as zip files have it (polynomial 0x04C11DB7, reflected).
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {
uint32_t crc32(uint32_t crc, const void* data, size_t nbytes);
// The CRC of A followed by B, from the CRCs of both and the length of B.
uint32_t crc32_combine(uint32_t a, uint32_t b, uint64_t nbytes_b);
}  // namespace zckpt
