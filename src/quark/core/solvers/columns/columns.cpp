// The inner blocks of the column solvers (gptq.py) and of the scale search (importance.py): what numpy and torch would
// do in thousands of short calls. Every operation is that of core/quantize.py, rounded on its own, in the same order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "native.h"

// How values become codes. float_bits: of the mantissa, -1 for integers.
struct Grid {
    float min, max;
    int32_t divide, zero_before, zero_after, zero_decoded, float_bits;
    float smallest_power;
};

namespace {
constexpr int64_t kRows = 256;  // worked on at once: what a step reads stays in the nearest cache

INLINE float clipped(float x, float min, float max) { return x < min ? min : x > max ? max : x; }

INLINE float rounded_float(float x, const Grid& grid, float power) {
    const float value = clipped(x, grid.min, grid.max);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    bits &= 0x7f800000;
    float magic;
    std::memcpy(&magic, &bits, 4);
    magic = magic < grid.smallest_power ? grid.smallest_power : magic;
    magic *= power;
    return std::copysign((value + magic) - magic, value);
}

// y = decode(encode(x)). Scale and zero advance by `step`: 1 for a value each, 0 for one that all share.
template <bool Divide, bool Before, bool After, bool Decoded>
INLINE void integers(const Grid& grid, const float* x, const float* scale, const float* zero, int64_t step, float* y,
                     int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
        const float s = scale[r * step];
        float code = Divide ? x[r] / s : x[r] * (1.0f / s);
        if (Before) code += zero[r * step];
        code = std::rint(code);
        if (After) code += zero[r * step];
        code = clipped(code, grid.min, grid.max);
        if (Decoded) code -= zero[r * step];
        y[r] = code * s;
    }
}

INLINE void floats(const Grid& grid, const float* x, const float* scale, int64_t step, float* y, int64_t n) {
    const float power = 1.5f * std::ldexp(1.0f, 23 - grid.float_bits);
    for (int64_t r = 0; r < n; ++r) {
        const float s = scale[r * step];
        y[r] = rounded_float(x[r] / (s == 0 ? 1.0f : s), grid, power) * s;
    }
}

INLINE void quantized(const Grid& grid, const float* x, const float* scale, const float* zero, int64_t step, float* y,
                      int64_t n) {
    if (grid.float_bits >= 0) return floats(grid, x, scale, step, y, n);
    if (grid.divide) return integers<true, false, false, false>(grid, x, scale, zero, step, y, n);
    if (grid.zero_before) return integers<false, true, false, true>(grid, x, scale, zero, step, y, n);
    if (grid.zero_after) return integers<false, false, true, true>(grid, x, scale, zero, step, y, n);
    integers<false, false, false, false>(grid, x, scale, zero, step, y, n);
}

FOR_EACH_CPU void quantize_each(const Grid& grid, const float* x, const float* scale, const float* zero, float* y,
                                int64_t n) {
    quantized(grid, x, scale, zero, 1, y, n);
}

FOR_EACH_CPU void add_scaled(float factor, const float* x, float* y, int64_t n) {
    for (int64_t r = 0; r < n; ++r) y[r] += factor * x[r];
}

FOR_EACH_CPU void subtract(const float* a, const float* b, float* y, int64_t n) {
    for (int64_t r = 0; r < n; ++r) y[r] = a[r] - b[r];
}

FOR_EACH_CPU void add_divided(const float* x, float divisor, float* y, int64_t n) {
    for (int64_t r = 0; r < n; ++r) y[r] += x[r] / divisor;
}

FOR_EACH_CPU bool any(const float* x, int64_t n) {
    int32_t found = 0;
    for (int64_t r = 0; r < n; ++r) found |= x[r] != 0;
    return found != 0;
}

// In 64 sums: the order is the same on every CPU.
FOR_EACH_CPU float weighted_square(const float* x, const float* y, const float* weight, int64_t n) {
    constexpr int64_t kLanes = 64;
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float lost = y[i + lane] - x[i + lane];
            sums[lane] += lost * lost * weight[i + lane];
        }
    }
    for (; i < n; ++i) sums[i % kLanes] += (y[i] - x[i]) * (y[i] - x[i]) * weight[i];
    float total = 0;
    for (float sum : sums) total += sum;
    return total;
}

// Likewise in 64 sums.
FOR_EACH_CPU float dot(const float* x, const float* y, int64_t n) {
    constexpr int64_t kLanes = 64;
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
    }
    for (; i < n; ++i) sums[i % kLanes] += x[i] * y[i];
    float total = 0;
    for (float sum : sums) total += sum;
    return total;
}

FOR_EACH_CPU void quantize_part(const Grid& grid, const float* x, const float* scale, const float* zero, float* y,
                                int64_t n) {
    // Copies, which no result can overlap: the compiler may keep them.
    const float one_scale = *scale, one_zero = zero ? *zero : 0.0f;
    quantized(grid, x, &one_scale, &one_zero, 0, y, n);
}
}  // namespace

// Columns [0, columns) of a block, each a run of `rows` floats, `stride` apart:
//     work_j += sum_{i < j} feedback_ij missed_i [+ pull_ij work_i],   result_j = Q(work_j)
//     missed_j = target_j - result_j
EXPORT void solve_columns(float* work, const float* target, float* missed, float* result, const float* feedback,
                          const float* pull, const float* scale, const float* zero, int64_t stride,
                          int64_t scale_stride, int64_t feedback_stride, int64_t columns, int64_t rows,
                          const Grid* grid) {
    for (int64_t start = 0; start < rows; start += kRows) {
        const int64_t n = std::min(kRows, rows - start);
        for (int64_t j = 0; j < columns; ++j) {
            const int64_t at = j * stride + start, scale_at = j * scale_stride + start;
            for (int64_t i = 0; i < j; ++i) {
                const int64_t from = i * stride + start;
                add_scaled(feedback[i * feedback_stride + j], missed + from, work + at, n);
                if (pull) add_scaled(pull[i * feedback_stride + j], work + from, work + at, n);
            }
            quantize_each(*grid, work + at, scale + scale_at, zero ? zero + scale_at : nullptr, result + at, n);
            subtract(target + at, result + at, missed + at, n);
        }
    }
}

// Coordinate descent: result_j <- Q(result_j + gradient_j / hessian_jj), gradient_k += hessian_kj change_j for k > j.
EXPORT void refine_columns(float* result, float* gradient, float* change, const float* hessian, const float* scale,
                           const float* zero, int64_t stride, int64_t scale_stride, int64_t hessian_stride,
                           int64_t columns, int64_t rows, const Grid* grid) {
    bool moved[1024];
    float wanted[kRows];
    for (int64_t start = 0; start < rows; start += kRows) {
        const int64_t n = std::min(kRows, rows - start);
        for (int64_t j = 0; j < columns; ++j) {
            const int64_t at = j * stride + start, scale_at = j * scale_stride + start;
            const float* sides = hessian + j * hessian_stride;
            for (int64_t i = 0; i < j; ++i) {
                if (moved[i]) add_scaled(sides[i], change + i * stride + start, gradient + at, n);
            }
            std::copy(result + at, result + at + n, wanted);
            std::copy(wanted, wanted + n, change + at);
            add_divided(gradient + at, sides[j], wanted, n);
            quantize_each(*grid, wanted, scale + scale_at, zero ? zero + scale_at : nullptr, result + at, n);
            subtract(change + at, result + at, change + at, n);
            moved[j] = any(change + at, n);
        }
    }
}

// The same where rows depend on each other by `scores`, (rows, rows), one row after the other in each column:
//     result_jr <- Q(result_jr + gradient_jr / (scores_rr hessian_jj)),  change_j = moved_j scores
//     gradient_js += hessian_jj scores_rs moved_jr,  gradient_k += hessian_kj change_j for k > j
EXPORT void couple_columns(float* result, float* gradient, float* change, const float* hessian, const float* scores,
                           const float* scale, const float* zero, int64_t stride, int64_t scale_stride,
                           int64_t hessian_stride, int64_t columns, int64_t rows, const Grid* grid) {
    for (int64_t j = 0; j < columns; ++j) {
        const float* sides = hessian + j * hessian_stride;
        const float* scales = scale + j * scale_stride;
        const float* zeros = zero ? zero + j * scale_stride : nullptr;
        float *values = result + j * stride, *slope = gradient + j * stride, *moved = change + j * stride;
        for (int64_t i = 0; i < j; ++i) add_scaled(sides[i], change + i * stride, slope, rows);
        std::fill(moved, moved + rows, 0.0f);
        for (int64_t r = 0; r < rows; ++r) {
            const float* others = scores + r * rows;
            const float wanted = values[r] + (slope[r] + sides[j] * moved[r]) / (others[r] * sides[j]);
            float found;
            quantize_part(*grid, &wanted, scales + r, zeros ? zeros + r : nullptr, &found, 1);
            if (found != values[r]) add_scaled(values[r] - found, others, moved, rows);
            values[r] = found;
        }
        add_scaled(sides[j], moved, slope, rows);
    }
}

// First solution of such rows, F of the columns and R of the rows being unit upper triangles:
//     work_j += sum_{i < j} F_ij missed_i,   lost_j = work_j - result_j,   missed_j = target_j - result_j
//     result_jr = Q(work_jr + offset_jr + sum_{s < r} R_sr lost_js)
EXPORT void solve_coupled(float* work, float* offset, const float* target, float* missed, float* lost, float* result,
                          const float* feedback, const float* of_rows, const float* scale, const float* zero,
                          int64_t stride, int64_t scale_stride, int64_t feedback_stride, int64_t columns, int64_t rows,
                          const Grid* grid) {
    for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = j * stride;
        for (int64_t i = 0; i < j; ++i) {
            add_scaled(feedback[i * feedback_stride + j], missed + i * stride, work + at, rows);
        }
        for (int64_t r = 0; r < rows; ++r) {
            const float wanted = work[at + r] + offset[at + r];
            const int64_t scale_at = j * scale_stride + r;
            quantize_part(*grid, &wanted, scale + scale_at, zero ? zero + scale_at : nullptr, result + at + r, 1);
            lost[at + r] = work[at + r] - result[at + r];
            missed[at + r] = target[at + r] - result[at + r];
            add_scaled(lost[at + r], of_rows + r * rows + r + 1, offset + at + r + 1, rows - r - 1);
        }
    }
}

// sum_i weight_i (Q(x_i) - x_i)^2 of `parts` runs of `size` values with one scale each; weights repeat after `period`.
EXPORT void part_errors(const float* x, const float* weight, int64_t period, const float* scale, const float* zero,
                        int64_t parts, int64_t size, float* errors, const Grid* grid) {
    float y[kRows];
    for (int64_t part = 0; part < parts; ++part) {
        float total = 0;
        for (int64_t start = 0; start < size; start += kRows) {
            const int64_t n = std::min(kRows, size - start), at = part * size + start;
            quantize_part(*grid, x + at, scale + part, zero ? zero + part : nullptr, y, n);
            total += weighted_square(x + at, y, weight + at % period, n);
        }
        errors[part] = total;
    }
}

// errors_rc = Q_rc(x_r) - x_r of `runs` runs of `size` values, each under `candidates` scales.
EXPORT void candidate_errors(const float* x, const float* scale, const float* zero, int64_t runs, int64_t candidates,
                             int64_t size, float* errors, const Grid* grid) {
    for (int64_t i = 0; i < runs * candidates; ++i) {
        const float* run = x + i / candidates * size;
        float* error = errors + i * size;
        quantize_part(*grid, run, scale + i, zero ? zero + i : nullptr, error, size);
        subtract(error, run, error, size);
    }
}

// dots_rc = sum_i (Q_rc(x_ri) - x_ri) other_ri: of the errors above, none of which is kept.
EXPORT void candidate_dots(const float* x, const float* other, const float* scale, const float* zero, int64_t runs,
                           int64_t candidates, int64_t size, float* dots, const Grid* grid) {
    float error[kRows];
    for (int64_t i = 0; i < runs * candidates; ++i) {
        float total = 0;
        for (int64_t start = 0; start < size; start += kRows) {
            const int64_t n = std::min(kRows, size - start), at = i / candidates * size + start;
            quantize_part(*grid, x + at, scale + i, zero ? zero + i : nullptr, error, n);
            subtract(error, x + at, error, n);
            total += dot(error, other + at, n);
        }
        dots[i] = total;
    }
}

// dots_r = sum_i x_ri y_ri.
EXPORT void row_dots(const float* x, const float* y, int64_t rows, int64_t size, float* dots) {
    for (int64_t row = 0; row < rows; ++row) dots[row] = dot(x + row * size, y + row * size, size);
}
