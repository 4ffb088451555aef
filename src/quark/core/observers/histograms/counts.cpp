// What a histogram needs of a float32 tensor in one pass: extremes, and counts of the upper 16 bits of the patterns.
#include <algorithm>
#include <cstdint>

#include "native.h"

namespace {
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

struct Range {
    int32_t low = kMagnitude, high = ~kMagnitude, largest = 0;
};

// As integers whose order is that of the floats, because these compilers vectorise.
FOR_EACH_CPU void widen(Range& range, const int32_t* patterns, int64_t n) {
    int32_t low = range.low, high = range.high, largest = range.largest;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t magnitude = patterns[i] & kMagnitude;
        const int32_t ordered = patterns[i] < 0 ? -magnitude : magnitude;
        low = ordered < low ? ordered : low;
        high = ordered > high ? ordered : high;
        largest = magnitude > largest ? magnitude : largest;
    }
    range = {low, high, largest};
}
}  // namespace

// Adds to counts[65536], indexed by the pattern's upper half with its sign bit flipped: ascending as int16.
// extremes: the patterns of the smallest and the largest value; of a NaN where there is one. n > 0.
EXPORT void count_patterns(const int32_t* patterns, int64_t n, int64_t* counts, int32_t* extremes) {
    constexpr int64_t kBlock = 8192;
    Range range;
    for (int64_t start = 0; start < n; start += kBlock) {
        const int64_t size = std::min(kBlock, n - start);
        widen(range, patterns + start, size);
        // One table: several, so that equal neighbours need not wait for each other, cost more to clear and add up.
        for (int64_t i = start; i < start + size; ++i) counts[(uint32_t(patterns[i]) >> 16) ^ 0x8000]++;
    }
    for (const int32_t ordered : {range.low, range.high}) {
        *extremes++ = range.largest > kInfinity ? range.largest : ordered < 0 ? (-ordered | ~kMagnitude) : ordered;
    }
}
