// Products of bfloat16 matrices with sums in float32, by the processor's instruction for them; see products.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native.h"

#if defined(__x86_64__) && defined(__linux__) && ((defined(__clang__) && __clang_major__ >= 12) || __GNUC__ >= 11)
#include <immintrin.h>
#define PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace {
// A tile of the result stays in 24 registers while it sums over kTokens; two operand panels stay in the nearest cache.
constexpr int64_t kRows = 12, kColumns = 32, kTokens = 256, kPairs = kTokens / 2, kBlock = 1032;

PAIRS __mmask16 lanes(int64_t n) { return __mmask16(n <= 0 ? 0 : n >= 16 ? 0xffff : (1u << n) - 1); }

// 16 numbers as bfloat16.
PAIRS __m256i loaded(__mmask16 read, const uint16_t* x) { return _mm256_maskz_loadu_epi16(read, x); }
PAIRS __m256i loaded(__mmask16 read, const float* x) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(read, x));
}

// Channels [0, count) of all tokens as `width` words for each two tokens, the first one in the low half; rest is 0.
// Channel c of token t is x[t * stride + c].
template <class T>
PAIRS void pack(const T* x, int64_t stride, int64_t tokens, int64_t count, int64_t width, uint32_t* packed) {
    for (int64_t t = 0; t < tokens; t += 2) {
        for (int64_t c = 0; c < width; c += 16) {
            const __mmask16 read = lanes(count - c);
            const __m256i low = loaded(read, x + t * stride + c);
            const __m256i high = t + 1 < tokens ? loaded(read, x + (t + 1) * stride + c) : _mm256_setzero_si256();
            const __m512i words = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                  _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm512_mask_storeu_epi32(packed + t / 2 * width + c, lanes(width - c), words);
        }
    }
}

// The same where channel c of token t is x[c * stride + t].
template <class T>
PAIRS void pack_rows(const T* x, int64_t stride, int64_t tokens, int64_t count, int64_t width, uint32_t* packed) {
    alignas(32) uint32_t words[8];
    const int64_t pairs = (tokens + 1) / 2;
    for (int64_t c = 0; c < width; ++c) {
        for (int64_t p = 0; p < pairs; p += 8) {
            const __mmask16 read = lanes(c < count ? tokens - 2 * p : 0);
            _mm256_store_si256((__m256i*)words, loaded(read, x + (c < count ? c * stride : 0) + 2 * p));
            for (int64_t i = 0; i < std::min<int64_t>(8, pairs - p); ++i) packed[(p + i) * width + c] = words[i];
        }
    }
}

// total (rows, columns) += share * the sum over pairs.
PAIRS void tile(const uint32_t* left, const uint32_t* right, int64_t pairs, float share, float* total, int64_t stride,
                int64_t rows, int64_t columns) {
    __m512 sums[kRows][2];
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        const auto first = (__m512bh)_mm512_loadu_si512(right + p * kColumns);
        const auto second = (__m512bh)_mm512_loadu_si512(right + p * kColumns + 16);
#pragma GCC unroll 12
        for (int i = 0; i < kRows; ++i) {
            const auto both = (__m512bh)_mm512_set1_epi32(int32_t(left[p * kRows + i]));
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], both, first);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], both, second);
        }
    }
    const __mmask16 masks[2] = {lanes(columns), lanes(columns - 16)};
    const __m512 factor = _mm512_set1_ps(share);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
        if (i >= rows) break;
        for (int half = 0; half < 2; ++half) {
            float* to = total + i * stride + 16 * half;
            const __m512 before = _mm512_maskz_loadu_ps(masks[half], to);
            _mm512_mask_storeu_ps(to, masks[half], _mm512_add_ps(before, _mm512_mul_ps(factor, sums[i][half])));
        }
    }
}

// A matrix as it lies: of float32 or bfloat16, channels or tokens side by side.
struct Matrix {
    const void* x;
    int64_t stride;
    bool wide, rows;
    PAIRS void packed(int64_t token, int64_t channel, int64_t tokens, int64_t count, int64_t width,
                      uint32_t* to) const {
        const int64_t at = rows ? channel * stride + token : token * stride + channel;
        if (wide) {
            (rows ? pack_rows<float> : pack<float>)((const float*)x + at, stride, tokens, count, width, to);
        } else {
            (rows ? pack_rows<uint16_t> : pack<uint16_t>)((const uint16_t*)x + at, stride, tokens, count, width, to);
        }
    }
};
}  // namespace

// Whether this processor has the instruction.
EXPORT int32_t has_pairs() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16"); }

// Columns [from, to) of total (rows, columns): total_ij += share * sum_t left_ti right_tj, over tokens t. `from` is a
// multiple of 32. Wide: of float32, which is rounded. Rows: whether the tokens of a channel lie side by side. Upper: of
// tiles below the diagonal none is found.
EXPORT void add_products(const void* left, int64_t left_stride, int32_t left_wide, int32_t left_rows,
                         const void* right, int64_t right_stride, int32_t right_wide, int32_t right_rows,
                         int64_t tokens, float share, float* total, int64_t stride, int64_t rows, int64_t from,
                         int64_t to, int32_t upper) {
    alignas(64) static thread_local uint32_t lefts[kBlock * kPairs], rights[kColumns * kPairs];
    const Matrix a{left, left_stride, left_wide != 0, left_rows != 0};
    const Matrix b{right, right_stride, right_wide != 0, right_rows != 0};
    for (int64_t t = 0; t < tokens; t += kTokens) {
        const int64_t some = std::min(kTokens, tokens - t), pairs = (some + 1) / 2;
        for (int64_t block = 0; block < rows; block += kBlock) {
            const int64_t last = std::min(rows, block + kBlock);
            for (int64_t i = block; i < last; i += kRows) {
                a.packed(t, i, some, std::min(kRows, last - i), kRows, lefts + (i - block) * kPairs);
            }
            for (int64_t j = from; j < to; j += kColumns) {
                const int64_t columns = std::min(kColumns, to - j);
                b.packed(t, j, some, columns, kColumns, rights);
                for (int64_t i = block; i < last && !(upper && i >= j + columns); i += kRows) {
                    tile(lefts + (i - block) * kPairs, rights, pairs, share, total + i * stride + j, stride,
                         std::min(kRows, last - i), columns);
                }
            }
        }
    }
}
#else
EXPORT int32_t has_pairs() { return 0; }
EXPORT void add_products(const void*, int64_t, int32_t, int32_t, const void*, int64_t, int32_t, int32_t, int64_t, float,
                         float*, int64_t, int64_t, int64_t, int64_t, int32_t) {}
#endif
