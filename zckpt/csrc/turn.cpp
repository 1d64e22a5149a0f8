#include "turn.h"

#include "dtypes.h"
#include "halves.h"

namespace zckpt {

#if defined(ZCKPT_X86)
namespace {

// Eight numbers side by side, as fp32.
struct Singles {
  static constexpr uint64_t kSize = 4;
  ZCKPT_HALVES static ZCKPT_INLINE __m256 at(const char* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }
};

struct WidenedHalves {
  static constexpr uint64_t kSize = 2;
  ZCKPT_HALVES static ZCKPT_INLINE __m256 at(const char* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
};

struct WidenedBf16 {
  static constexpr uint64_t kSize = 2;
  ZCKPT_HALVES static ZCKPT_INLINE __m256 at(const char* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
};

// Brings what the columns to the right will be written to into the cache: no processor foresees it, and waiting for it takes most
// of the time.
ZCKPT_INLINE void fetch_next(const char* to, int64_t step) {
  for (int64_t i = kSide; i < 2 * static_cast<int64_t>(kSide); ++i) _mm_prefetch(to + i * step, _MM_HINT_T0);
}

template <typename Row>
ZCKPT_HALVES bool into_singles(const char* from, uint64_t pitch, uint64_t rows, uint64_t columns, char* out, int64_t step) {
  for (uint64_t c = 0; c < columns; c += kSide, out += kSide * step)
    for (uint64_t r = 0; r < rows; r += kSide) {
      __m256 a[8], b[8];
      for (uint64_t i = 0; i < 8; ++i) a[i] = Row::at(from + (r + i) * pitch + c * Row::kSize);
      for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
      for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44), a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44), a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
      }
      char* to = out + r * sizeof(float);
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + i * step), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * step), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
      }
      fetch_next(to, step);
    }
  return true;
}

// Eight rows of numbers in 2 bytes each, two rows at a time: number c of both is the 4 bytes at c. `over` gets bits that are set where
// a finite number became infinite.
struct Halves {
  static constexpr uint64_t kSize = 2;
  ZCKPT_HALVES static ZCKPT_INLINE void pairs(const char* from, uint64_t pitch, __m256i* to, __m256i&) {
    for (uint64_t i = 0; i < 4; ++i) to[i] = paired(at(from + 2 * i * pitch), at(from + (2 * i + 1) * pitch));
  }
  ZCKPT_HALVES static ZCKPT_INLINE __m128i at(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  ZCKPT_HALVES static ZCKPT_INLINE __m256i paired(__m128i a, __m128i b) { return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)); }
};

ZCKPT_HALVES ZCKPT_INLINE __m256i bits_at(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

struct RoundedHalves {
  static constexpr uint64_t kSize = 4;
  ZCKPT_HALVES static ZCKPT_INLINE void pairs(const char* from, uint64_t pitch, __m256i* to, __m256i& over) {
    for (uint64_t i = 0; i < 4; ++i) to[i] = Halves::paired(at(from + 2 * i * pitch, over), at(from + (2 * i + 1) * pitch, over));
  }
  ZCKPT_HALVES static ZCKPT_INLINE __m128i at(const char* from, __m256i& over) {
    const __m256i x = bits_at(from);
    over = _mm256_or_si256(over, over_f16(magnitudes(x)));
    return _mm256_cvtps_ph(_mm256_castsi256_ps(x), _MM_FROUND_TO_NEAREST_INT);
  }
};

struct RoundedBf16 {
  static constexpr uint64_t kSize = 4;
  ZCKPT_HALVES static ZCKPT_INLINE void pairs(const char* from, uint64_t pitch, __m256i* to, __m256i& over) {
    __m256i x[8], most = _mm256_setzero_si256();
    for (uint64_t i = 0; i < 8; ++i) x[i] = bits_at(from + i * pitch), most = _mm256_max_epi32(most, magnitudes(x[i]));
    const __m256i special = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(kLargest));
    if (_mm256_testz_si256(special, special)) {
      for (int i = 0; i < 8; ++i) x[i] = nearest_bf16(x[i]);
    } else {
      for (int i = 0; i < 8; ++i) {
        const __m256i a = magnitudes(x[i]);
        over = _mm256_or_si256(over, over_bf16(a));
        x[i] = _mm256_slli_epi32(rounded_bf16(x[i], a), 16);
      }
    }
    for (int i = 0; i < 4; ++i) to[i] = _mm256_blend_epi16(_mm256_srli_epi32(x[2 * i], 16), x[2 * i + 1], 0xAA);
  }
};

template <typename Rows>
ZCKPT_HALVES bool into_halves(const char* from, uint64_t pitch, uint64_t rows, uint64_t columns, char* out, int64_t step) {
  __m256i over = _mm256_setzero_si256();
  for (uint64_t c = 0; c < columns; c += kSide, out += kSide * step)
    for (uint64_t r = 0; r < rows; r += kSide) {
      __m256i a[4], b[4];
      Rows::pairs(from + r * pitch + c * Rows::kSize, pitch, a, over);
      for (int i = 0; i < 2; ++i) b[i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]), b[i + 2] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
      for (int i = 0; i < 2; ++i) a[2 * i] = _mm256_unpacklo_epi64(b[2 * i], b[2 * i + 1]), a[2 * i + 1] = _mm256_unpackhi_epi64(b[2 * i], b[2 * i + 1]);
      char* to = out + r * sizeof(uint16_t);
      for (int i = 0; i < 4; ++i) {  // columns i and i + 4
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * step), _mm256_castsi256_si128(a[i]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (i + 4) * step), _mm256_extracti128_si256(a[i], 1));
      }
      fetch_next(to, step);
    }
  return _mm256_testz_si256(over, over);
}

}  // namespace

TurnSquares squares_turned(uint8_t from, uint8_t to) {
  if (!has(Unit::kHalves)) return nullptr;
  if (from == to) return kItemSize[to] == 4 ? into_singles<Singles> : kItemSize[to] == 2 ? into_halves<Halves> : nullptr;
  if (from == F32) return to == BF16 ? into_halves<RoundedBf16> : to == F16 ? into_halves<RoundedHalves> : nullptr;
  if (to == F32) return from == BF16 ? into_singles<WidenedBf16> : from == F16 ? into_singles<WidenedHalves> : nullptr;
  return nullptr;
}

#else

TurnSquares squares_turned(uint8_t, uint8_t) { return nullptr; }

#endif

}  // namespace zckpt
