// y = x W^T over packed weights.
//
// Packed weights are words [panels, steps, 32]: panel p holds output columns 32p ... 32p + 31, step s the words s of
// their rows of W. Every output element is one chain of additions along the steps, in fp32, whatever the number of
// rows and whoever computes it: so the bits of a row depend on that row and on W only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"
#include "vector.h"

namespace rollout {

constexpr int kPanel = 2 * kLanes;

#ifdef __AVX512F__
constexpr int kTileRows = 12;  // 24 accumulators of 32 registers
#else
constexpr int kTileRows = 3;
#endif

struct Linear {
    const uint32_t* words;
    const void* bias;  // one element per output column, padding included; null if there is none
    int32_t steps;
    int32_t panels;

    const uint32_t* panel(int p) const { return words + (int64_t)p * steps * kPanel; }
};

struct Tile {
    alignas(64) float at[kTileRows][kPanel];
};

using TileKernel = void (*)(const uint32_t* a, int64_t stride, const uint32_t* w, int steps, Tile& tile,
                            const char* next, int64_t next_step);

// `rows` rows of words `a`, `stride` words apart, times one panel. What is at `next` will be wanted soon.
template <class T, int rows>
void multiply_tile(const uint32_t* a, int64_t stride, const uint32_t* w, int steps, Tile& tile, const char* next,
                   int64_t next_step) {
    F32 acc[rows][2] = {};
    for (int s = 0; s < steps; s++) {
        const U32 left = load_as<U32>(w + (int64_t)s * kPanel), right = load_as<U32>(w + (int64_t)s * kPanel + kLanes);
        prefetch(next);
        if (rows < 6) prefetch(next + next_step / 2);
        next += next_step;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const uint32_t x = a[r * stride + s];
            acc[r][0] = dot<T>(acc[r][0], x, left);
            acc[r][1] = dot<T>(acc[r][1], x, right);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(tile.at[r], acc[r][0]);
        store(tile.at[r] + kLanes, acc[r][1]);
    }
}

template <class T, int rows = kTileRows>
TileKernel tile_kernel(int wanted) {
    if constexpr (rows > 1)
        return wanted == rows ? multiply_tile<T, rows> : tile_kernel<T, rows - 1>(wanted);
    else
        return multiply_tile<T, 1>;
}

// Multiply `rows` rows of `a`, `stride` elements apart. For panels p < `panels` and tiles of rows it calls
// done(p, first row, rows, tiles), where tiles[i] holds columns of panel p + i * panels. Ends at the team's barrier.
template <class T, int sets = 1, class Done>
void multiply(Team& team, const Linear& w, const T* a, int64_t stride, int rows, Done done) {
    if (!rows) return team.barrier();
    const int panels = w.panels / sets, tiles = (rows + kTileRows - 1) / kTileRows;
    const auto* words = reinterpret_cast<const uint32_t*>(a);
    const int64_t word_stride = stride / kWord<T>, panel_bytes = (int64_t)w.steps * kPanel * sizeof(uint32_t);
    const int64_t next_step = panel_bytes / w.steps / tiles;
    team.share(panels, [&](int p) {
        Tile out[sets];
        for (int t = 0; t < tiles; t++) {
            const int first = (int64_t)rows * t / tiles, last = (int64_t)rows * (t + 1) / tiles;
            const TileKernel kernel = tile_kernel<T>(last - first);
            for (int i = 0; i < sets; i++) {
                const uint32_t* panel = w.panel(p + i * panels);
                const char* next = reinterpret_cast<const char*>(panel) + panel_bytes + w.steps * next_step * t;
                kernel(words + first * word_stride, word_stride, panel, w.steps, out[i], next, next_step);
            }
            done(p, first, last - first, out);
        }
    });
}

// A tile's row, as F32, with the bias of its columns.
template <class T>
ROLLOUT_INLINE F32 biased(const Linear& w, const Tile& tile, int row, int panel, int half) {
    F32 y = load(tile.at[row] + half);
    if (w.bias) y += load(static_cast<const T*>(w.bias) + panel * kPanel + half);
    return y;
}

}  // namespace rollout
