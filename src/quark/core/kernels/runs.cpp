// Runs: values that lie beside each other and share a scale. Their ranges, and their codes, in one pass over memory.
//
//     integers   code = clamp(round_half_even(x * inverse of the scale) + zero, low, high) - shift
//     floats     code of the value of the type that is nearest to clamp(x / scale, low, high), ties to even
//
// Values are bfloat16 or float32; arithmetic is float32, each operation rounded on its own. Codes have 8 bits, or 4,
// of which words hold 8: value i of a word in bits 4 * place[i] and up.
#include <cstdint>
#include <cstring>

#include "native.h"

// What a code is; core/kernels/runs.py fills it in.
struct CodeRule {
    float low, high;         // the range of the type
    float shift;             // taken from integer codes
    float least;             // floats: 2^emin, below which values are evenly spaced
    float rounder;           // floats: 1.5 * 2^(23 - mbits); its product with 2^e has its last bit at the step there
    float small;             // floats: 2^(mbits - emin), the codes in 1.0 below `least`
    int32_t is_float, bits;  // bits of a code
    int32_t drop, offset;    // floats: 23 - mbits; (127 - bias) << mbits
    int32_t sign;            // floats: the bit of the sign in a code, 0 for types without
    int32_t place[8];        // 4 bits: where each of eight codes lies in its word
};

namespace {
INLINE float as_float(int32_t pattern) {
    float value;
    std::memcpy(&value, &pattern, 4);
    return value;
}
INLINE int32_t as_pattern(float value) {
    int32_t pattern;
    std::memcpy(&pattern, &value, 4);
    return pattern;
}
INLINE float widened(int16_t pattern) { return as_float(int32_t(uint32_t(uint16_t(pattern)) << 16)); }
INLINE float widened(int32_t pattern) { return as_float(pattern); }

// The range of each run as floats; NaN where a value is. Patterns are compared as integers, negative ones turned
// round, because compilers vectorise that; their order is that of the floats.
template <typename Pattern, Pattern kMagnitude, Pattern kInfinity>
INLINE void ranges(const Pattern* x, int64_t runs, int64_t length, float* low, float* high) {
    for (int64_t run = 0; run < runs; ++run, x += length) {
        Pattern least = kMagnitude, most = -kMagnitude, largest = 0;
        for (int64_t i = 0; i < length; ++i) {
            const Pattern magnitude = x[i] & kMagnitude;
            const Pattern ordered = x[i] < 0 ? Pattern(-magnitude) : magnitude;
            least = ordered < least ? ordered : least;
            most = ordered > most ? ordered : most;
            largest = magnitude > largest ? magnitude : largest;
        }
        const auto value = [&](Pattern ordered) {
            return ordered < 0 ? -widened(Pattern(-ordered)) : widened(ordered);
        };
        low[run] = largest > kInfinity ? widened(largest) : value(least);
        high[run] = largest > kInfinity ? widened(largest) : value(most);
    }
}

// `rounder` is 1.5 * 2^23, whose sum with a smaller float has no bits below 1: the addition rounds half to even. No
// code needs more than 1024.
template <typename Pattern>
INLINE void integer_codes(const Pattern* RESTRICT x, int64_t count, float by, float plus, const CodeRule rule,
                          uint8_t* RESTRICT out) {
    constexpr float rounder = 12582912.0f;
    const float low = rule.low, high = rule.high, shift = rule.shift;
    for (int64_t i = 0; i < count; ++i) {
        float value = widened(x[i]) * by;
        value = value > -1024.0f ? value : -1024.0f;
        value = value < 1024.0f ? value : 1024.0f;
        value = (value + rounder) - rounder + plus;
        value = value > low ? value : low;
        value = value < high ? value : high;
        out[i] = uint8_t(int32_t(value - shift));
    }
}

template <typename Pattern>
INLINE void float_codes(const Pattern* RESTRICT x, int64_t count, float scale, const CodeRule rule,
                        uint8_t* RESTRICT out) {
    const float low = rule.low, high = rule.high, least = rule.least, rounder = rule.rounder, small = rule.small;
    const int32_t drop = rule.drop, offset = rule.offset, sign = rule.sign, top = 32 - rule.bits;
    for (int64_t i = 0; i < count; ++i) {
        float value = widened(x[i]) / scale;
        value = value > low ? value : low;
        value = value < high ? value : high;
        const int32_t pattern = as_pattern(value);
        float step = as_float(pattern & 0x7f800000);
        step = (step > least ? step : least) * rounder;
        const int32_t magnitude = as_pattern((value + step) - step) & 0x7fffffff;
        float below = as_float(magnitude);
        below = (below < least ? below : least) * small;
        const int32_t normal = (magnitude >> drop) - offset, even = int32_t(below);
        const int32_t code = normal > even ? normal : even;
        out[i] = uint8_t(code | ((pattern >> top) & sign));
    }
}

template <typename Pattern>
INLINE void codes_of(const Pattern* x, int64_t count, float scale, float zero, const CodeRule& rule, uint8_t* out) {
    if (rule.is_float)
        return count == 32 ? float_codes(x, 32, scale, rule, out) : float_codes(x, count, scale, rule, out);
    // Loops of a known length have no beginning and no end.
    if (count == 128) return integer_codes(x, 128, scale, zero, rule, out);
    if (count == 32) return integer_codes(x, 32, scale, zero, rule, out);
    integer_codes(x, count, scale, zero, rule, out);
}

// Words of eight codes of four bits each. A byte holds a code in its low half.
INLINE void pack(const uint8_t* codes, int64_t words, const CodeRule& rule, uint32_t* out) {
    for (int64_t i = 0; i < words; ++i, codes += 8) {
        uint32_t word = 0;
        for (int k = 0; k < 8; ++k) word |= uint32_t(codes[k] & 15) << (4 * rule.place[k]);
        out[i] = word;
    }
}

// In the order of the values two codes make a byte: a shift for all of them.
INLINE void pack_in_order(const uint8_t* codes, int64_t words, uint32_t* out) {
    for (int64_t i = 0; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, codes + 8 * i, 8);
        word &= 0x0f0f0f0f0f0f0f0fu;
        word = (word | word >> 4) & 0x00ff00ff00ff00ffu;
        word = (word | word >> 8) & 0x0000ffff0000ffffu;
        out[i] = uint32_t(word | word >> 16);
    }
}

INLINE bool in_order(const CodeRule& rule) {
    for (int k = 0; k < 8; ++k)
        if (rule.place[k] != k) return false;
    return true;
}

// A piece of a run, and a tile of columns and rows, stay in the caches; rows are many, because each column of a tile is
// a place in memory of its own.
constexpr int64_t kPiece = 4096, kTile = 128, kRows = 256;

// Each run has its own scale and zero, or all have the first (step 0).
template <typename Pattern>
INLINE void codes(const Pattern* x, int64_t runs, int64_t length, const float* scale, const float* zero, int64_t step,
                  const CodeRule* given, uint8_t* out) {
    const CodeRule rule = *given;
    const bool ordered = in_order(rule);
    const int64_t all = runs * length;
    uint8_t buffer[kPiece];
    uint32_t words[kPiece / 8];
    // As many runs at once as are a piece, or a long run in pieces.
    for (int64_t done = 0, count; done < all; done += count) {
        const int64_t run = done / length, stop = length > kPiece ? (run + 1) * length : all;
        const int64_t room = rule.bits == 8 ? all : length > kPiece ? kPiece : kPiece / length * length;
        count = stop - done < room ? stop - done : room;
        uint8_t* target = rule.bits == 8 ? out + done : buffer;
        for (int64_t at = 0, own = run; at < count; at += length, ++own)
            codes_of(x + done + at, count < length ? count : length, scale[own * step], zero ? zero[own * step] : 0.0f,
                     rule, target + at);
        if (rule.bits == 8) continue;
        if (ordered)
            pack_in_order(buffer, count / 8, words);
        else
            pack(buffer, count / 8, rule, words);
        std::memcpy(out + done / 2, words, size_t(count / 2));
    }
}

// Words along the rows: out[column * stride + row / 8] holds the codes of eight rows. `rows` is a multiple of 8, and
// a row has columns / length runs.
template <typename Pattern>
INLINE void transposed_codes(const Pattern* x, int64_t rows, int64_t columns, int64_t length, const float* scale,
                             const float* zero, const CodeRule* given, int64_t stride, uint32_t* out) {
    const CodeRule rule = *given;
    const int64_t runs = columns / length;
    uint8_t buffer[8 * kTile];
    uint32_t tile[kTile * (kRows / 8)];
    for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t octets = (rows - row < kRows ? rows - row : kRows) / 8;
        for (int64_t run = 0; run < runs; ++run)
            for (int64_t first = 0; first < length; first += kTile) {
                const int64_t width = length - first < kTile ? length - first : kTile;
                const int64_t column = run * length + first;
                for (int64_t octet = 0; octet < octets; ++octet) {
                    for (int64_t k = 0; k < 8; ++k) {
                        const int64_t own = row + 8 * octet + k, part = own * runs + run;
                        const Pattern* values = x + own * columns + column;
                        // No processor foresees pieces of rows: the eight next rows are asked for in time.
                        for (int64_t i = 0; i < width && own + 8 < rows; i += 64 / int64_t(sizeof(Pattern)))
                            SOON(values + 8 * columns + i);
                        codes_of(values, width, scale[part], zero ? zero[part] : 0.0f, rule,
                                 buffer + k * kTile);
                    }
                    uint32_t* words = tile + octet * kTile;
                    for (int64_t i = 0; i < width; ++i) {
                        uint32_t word = 0;
                        for (int k = 0; k < 8; ++k)
                            word |= uint32_t(buffer[k * kTile + i] & 15) << (4 * rule.place[k]);
                        words[i] = word;
                    }
                }
                for (int64_t i = 0; i < width; ++i) {
                    uint32_t* line = out + (column + i) * stride + row / 8;
                    for (int64_t octet = 0; octet < octets; ++octet) line[octet] = tile[octet * kTile + i];
                }
            }
    }
}

// Each run under a scale of its own range, as core/scales.py makes it of an integer type; codes are stored as `codes`
// does. `middle` is the zero point of a symmetric type, or -1 where the range, widened to 0, has one.
template <typename Pattern, Pattern kMagnitude, Pattern kInfinity>
INLINE void live_codes(const Pattern* x, int64_t runs, int64_t length, float middle, const CodeRule* given,
                       float* scale, float* zero, uint8_t* out) {
    constexpr float rounder = 12582912.0f, epsilon = 1.1920928955078125e-07f;
    const CodeRule rule = *given;
    const float steps = rule.high - rule.low;
    for (int64_t run = 0; run < runs; ++run) {
        float low, high;
        ranges<Pattern, kMagnitude, kInfinity>(x + run * length, 1, length, &low, &high);
        float step, place = middle;
        if (middle >= 0.0f) {
            step = (-low > high ? -low : high) / (steps / 2);
        } else {
            low = low > 0.0f ? 0.0f : low;
            high = high < 0.0f ? 0.0f : high;
            step = (high - low) / steps;
        }
        step = step < epsilon ? epsilon : step;  // NaN stays
        if (middle < 0.0f) {
            place = rule.low - ((low / step + rounder) - rounder);
            place = place < rule.low ? rule.low : place > rule.high ? rule.high : place;
        }
        scale[run] = step;
        zero[run] = place;
        codes_of(x + run * length, length, 1.0f / step, place, rule, out + run * length);
    }
}
}  // namespace

EXPORT FOR_EACH_CPU void live_codes_bfloat16(const int16_t* x, int64_t runs, int64_t length, float middle,
                                             const CodeRule* rule, float* scale, float* zero, uint8_t* out) {
    live_codes<int16_t, 0x7fff, 0x7f80>(x, runs, length, middle, rule, scale, zero, out);
}

EXPORT FOR_EACH_CPU void live_codes_float32(const int32_t* x, int64_t runs, int64_t length, float middle,
                                            const CodeRule* rule, float* scale, float* zero, uint8_t* out) {
    live_codes<int32_t, 0x7fffffff, 0x7f800000>(x, runs, length, middle, rule, scale, zero, out);
}

EXPORT FOR_EACH_CPU void ranges_bfloat16(const int16_t* x, int64_t runs, int64_t length, float* low, float* high) {
    ranges<int16_t, 0x7fff, 0x7f80>(x, runs, length, low, high);
}

EXPORT FOR_EACH_CPU void ranges_float32(const int32_t* x, int64_t runs, int64_t length, float* low, float* high) {
    ranges<int32_t, 0x7fffffff, 0x7f800000>(x, runs, length, low, high);
}

EXPORT FOR_EACH_CPU void codes_bfloat16(const int16_t* x, int64_t runs, int64_t length, const float* scale,
                                        const float* zero, int64_t step, const CodeRule* rule, uint8_t* out) {
    codes(x, runs, length, scale, zero, step, rule, out);
}

EXPORT FOR_EACH_CPU void codes_float32(const int32_t* x, int64_t runs, int64_t length, const float* scale,
                                       const float* zero, int64_t step, const CodeRule* rule, uint8_t* out) {
    codes(x, runs, length, scale, zero, step, rule, out);
}

EXPORT FOR_EACH_CPU void transposed_bfloat16(const int16_t* x, int64_t rows, int64_t columns, int64_t length,
                                             const float* scale, const float* zero, const CodeRule* rule,
                                             int64_t stride, uint32_t* out) {
    transposed_codes(x, rows, columns, length, scale, zero, rule, stride, out);
}

EXPORT FOR_EACH_CPU void transposed_float32(const int32_t* x, int64_t rows, int64_t columns, int64_t length,
                                            const float* scale, const float* zero, const CodeRule* rule,
                                            int64_t stride, uint32_t* out) {
    transposed_codes(x, rows, columns, length, scale, zero, rule, stride, out);
}
