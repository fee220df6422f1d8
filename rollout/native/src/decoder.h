// The decoder of the Llama and Qwen2 families as one job of a team: token ids in, hidden states and logits out.
//
// Rounds to the model's element type where Hugging Face does; sums, softmax and norms are in fp32. The bits of a row
// depend on its own sequence only, so batches need no padding and chunks no fixed boundaries.
#pragma once

#include <cstdint>
#include <utility>

#include "attention.h"
#include "linear.h"
#include "team.h"
#include "vector.h"

namespace rollout {

struct Layer {
    const void* attention_norm;
    const void* mlp_norm;
    Linear qkv;  // three parts, each padded to whole panels
    Linear out;
    Linear gate_up;  // two parts of equal size, likewise
    Linear down;
};

struct Model {
    Heads heads;
    int32_t layers, hidden, intermediate;
    float eps;
    const void* embedding;  // [vocabulary, hidden]
    const void* norm;
    const void* cos;  // [positions, head_dim / 2]
    const void* sin;
    const Layer* layer;
    Linear head;
};

// Rows of S sequences, one after the other; those of one are neighbouring positions.
struct Batch {
    int32_t rows, sequences, table_width;
    const int64_t* ids;
    const int64_t* positions;
    const int32_t* tables;   // [S, table_width] pages
    const int32_t* offsets;  // [S + 1] along the rows; null: one row each
};

constexpr int padded_to_panels(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

// Elements of one row of each intermediate result, and where its parts begin.
struct Widths {
    int hidden, keys, values, fused, mixed, active;

    explicit Widths(const Model& m) {
        const Heads& h = m.heads;
        hidden = padded_to_panels(m.hidden);
        keys = padded_to_panels(h.heads * h.head_dim);
        values = keys + padded_to_panels(h.kv_heads * h.head_dim);
        fused = values + padded_to_panels(h.kv_heads * h.head_dim);
        mixed = padded_to_panels(h.heads * h.head_dim);
        active = padded_to_panels(m.intermediate);
    }

    int64_t row() const { return 2 * hidden + fused + mixed + active; }
};

template <class T>
int64_t workspace_bytes(const Model& m, int rows, int threads) {
    return rows * Widths(m).row() * sizeof(T) + threads * AttentionScratch::floats(m.heads) * sizeof(float) + 256;
}

// Zhang and Sennrich, 2019: normalised in fp32, scaled in the element type.
template <class T>
void rms_norm(const T* x, const T* weight, int n, float eps, T* y) {
    F32 squares{};
    each_vector(n, [&](int i, int count) {
        const F32 part = load_up_to(x + i, count);
        squares = fused(part, part, squares);
    });
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
    each_vector(n, [&](int i, int count) {
        store_up_to(y + i, load_up_to(weight + i, count) * rounded<T>(load_up_to(x + i, count) * scale), count);
    });
}

// Su et al., 2021: channels i and i + half of a head turn as one plane.
template <class T>
void rotate(T* head, int half, const T* cos, const T* sin) {
    each_vector(half, [&](int i, int count) {
        const F32 x = load_up_to(head + i, count), y = load_up_to(head + half + i, count);
        const F32 c = load_up_to(cos + i, count), s = load_up_to(sin + i, count);
        store_up_to(head + i, rounded<T>(x * c) - rounded<T>(y * s), count);
        store_up_to(head + half + i, rounded<T>(y * c) + rounded<T>(x * s), count);
    });
}

template <class T>
class Forward {
   public:
    Forward(Team& team, const Model& model, const Pages& pages, const Batch& batch, void* workspace)
        : team_(team), m_(model), pages_(pages), b_(batch), w_(model) {
        auto* memory = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(workspace) + 63) & ~uintptr_t{63});
        auto take = [&](int64_t width) { return std::exchange(memory, memory + batch.rows * width); };
        x_ = take(w_.hidden);
        normed_ = take(w_.hidden);
        fused_ = take(w_.fused);
        mixed_ = take(w_.mixed);
        active_ = take(w_.active);
        scratch_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
    }

    // What member `member` of the team does; `hidden` is [rows, hidden] after the final norm.
    void run(int member, T* hidden) {
        const AttentionScratch scratch(scratch_ + member * AttentionScratch::floats(m_.heads), m_.heads);
        team_.share(b_.rows, [&](int r) {
            std::memcpy(x_ + r * (int64_t)w_.hidden, as<T>(m_.embedding) + b_.ids[r] * m_.hidden, m_.hidden * sizeof(T));
        });
        for (int i = 0; i < m_.layers; i++) {
            const Layer& layer = m_.layer[i];
            norm(layer.attention_norm, normed_, w_.hidden);
            project(layer.qkv);
            T* const keys = static_cast<T*>(pages_.base) + i * pages_.layer_stride;
            T* const values = keys + pages_.layer_stride / 2;
            place(keys, values);
            mix(keys, values, scratch);
            add(layer.out, mixed_, w_.mixed);
            norm(layer.mlp_norm, normed_, w_.hidden);
            activate(layer.gate_up);
            add(layer.down, active_, w_.active);
        }
        norm(m_.norm, hidden, m_.hidden);
    }

   private:
    template <class E>
    static const E* as(const void* p) {
        return static_cast<const E*>(p);
    }

    void norm(const void* weight, T* to, int64_t stride) {
        team_.share(b_.rows, [&](int r) {
            rms_norm(x_ + r * (int64_t)w_.hidden, as<T>(weight), m_.hidden, m_.eps, to + r * stride);
        });
    }

    void project(const Linear& w) {
        multiply<T>(team_, w, normed_, w_.hidden, b_.rows, [&](int p, int first, int rows, const Tile* tiles) {
            for (int r = 0; r < rows; r++)
                for (int half = 0; half < kPanel; half += kLanes)
                    store(fused_ + (first + r) * (int64_t)w_.fused + p * kPanel + half,
                          biased<T>(w, tiles[0], r, p, half));
        });
    }

    // Turn queries and keys, and put keys and values into their pages.
    void place(T* keys, T* values) {
        const Heads& h = m_.heads;
        const int half = h.head_dim / 2;
        each_row([&](int r, const int32_t* table) {
            T* row = fused_ + r * (int64_t)w_.fused;
            const int position = b_.positions[r];
            const T* cos = as<T>(m_.cos) + (int64_t)position * half;
            const T* sin = as<T>(m_.sin) + (int64_t)position * half;
            for (int n = 0; n < h.heads; n++) rotate(row + n * h.head_dim, half, cos, sin);
            for (int k = 0; k < h.kv_heads; k++) rotate(row + w_.keys + k * h.head_dim, half, cos, sin);
            const int64_t at = table[position / pages_.page_tokens] * pages_.page_stride +
                               (int64_t)(position % pages_.page_tokens) * h.kv_heads * h.head_dim;
            std::memcpy(keys + at, row + w_.keys, h.kv_heads * h.head_dim * sizeof(T));
            std::memcpy(values + at, row + w_.values, h.kv_heads * h.head_dim * sizeof(T));
        });
    }

    template <class F>
    void each_row(F f) {
        if (!b_.offsets) return team_.share(b_.rows, [&](int r) { f(r, b_.tables + (int64_t)r * b_.table_width); });
        team_.share(b_.sequences, [&](int s) {
            for (int r = b_.offsets[s]; r < b_.offsets[s + 1]; r++) f(r, b_.tables + (int64_t)s * b_.table_width);
        });
    }

    // Neighbouring tokens of one sequence, the heads of which attend together.
    struct Queries {
        int sequence, row, tokens;
    };

    // Walks the tiles of all sequences forward.
    class Tiles {
       public:
        Tiles(const Batch& batch, int tile_tokens) : b_(batch), most_(tile_tokens) {}

        // Tile number `tile`, not before an earlier answer's; no tokens if there are not so many.
        Queries operator()(int tile) {
            for (; sequence_ < b_.sequences; sequence_++) {
                const int first = b_.offsets ? b_.offsets[sequence_] : sequence_;
                const int rows = b_.offsets ? b_.offsets[sequence_ + 1] - first : 1;
                const int here = (rows + most_ - 1) / most_, skipped = (tile - before_) * most_;
                if (tile < before_ + here) return {sequence_, first + skipped, std::min(most_, rows - skipped)};
                before_ += here;
            }
            return {b_.sequences, 0, 0};
        }

       private:
        const Batch& b_;
        const int most_;
        int sequence_ = 0, before_ = 0;
    };

    // A thread takes all KV heads of a tile, which lie side by side in memory, unless there are few tiles. It has
    // the cache fetch what it will read next, in this tile and then in the one that it is likely to take next.
    void mix(const T* keys, const T* values, const AttentionScratch& scratch) {
        constexpr int kAhead = kBlock / kLanes;
        const Heads& h = m_.heads;
        const int splits = b_.sequences < 2 * team_.size() ? h.kv_heads : 1, each = h.kv_heads / splits;
        const int nearby = team_.size() / splits + (splits > 1);
        Tiles tiles(b_, h.tile_tokens()), next_tiles(b_, h.tile_tokens());
        for (;;) {
            const int piece = team_.claim(), tile = piece / splits, head = piece % splits * each;
            const Queries now = tiles(tile);
            if (!now.tokens) break;
            const Queries next = next_tiles(tile + nearby);
            const int end = last_position(now), coming_end = last_position(next), parts = end / kLanes + 1;
            const int bytes = h.head_dim * sizeof(T);
            for (int k = head; k < head + each; k++) {
                const int column = k * h.groups() * h.head_dim;
                const Context<T> context = context_of(now, keys, values, k), coming = context_of(next, keys, values, k);
                attend(h, context, fused_ + now.row * (int64_t)w_.fused + column, w_.fused,
                       mixed_ + now.row * (int64_t)w_.mixed + column, w_.mixed, (int)b_.positions[now.row], now.tokens,
                       scratch, [&](int part) {
                           if (const int ahead = part + kAhead; ahead < parts)
                               context.fetch(ahead * kLanes, end, bytes);
                           else if ((ahead - parts) * kLanes <= coming_end)
                               coming.fetch((ahead - parts) * kLanes, coming_end, bytes);
                       });
            }
        }
        team_.barrier();
    }

    Context<T> context_of(const Queries& queries, const T* keys, const T* values, int head) const {
        const Heads& h = m_.heads;
        return {keys + head * h.head_dim,
                values + head * h.head_dim,
                b_.tables + (int64_t)queries.sequence * b_.table_width,
                pages_.page_stride,
                (int64_t)h.kv_heads * h.head_dim,
                pages_.page_tokens};
    }

    int last_position(const Queries& queries) const {
        return queries.tokens ? (int)b_.positions[queries.row] + queries.tokens - 1 : -1;
    }

    // x += a W^T
    void add(const Linear& w, const T* a, int64_t stride) {
        multiply<T>(team_, w, a, stride, b_.rows, [&](int p, int first, int rows, const Tile* tiles) {
            for (int r = 0; r < rows; r++)
                for (int half = 0; half < kPanel; half += kLanes) {
                    T* x = x_ + (first + r) * (int64_t)w_.hidden + p * kPanel + half;
                    store(x, load(x) + rounded<T>(biased<T>(w, tiles[0], r, p, half)));
                }
        });
    }

    // Shazeer, 2020: silu(gate) * up.
    void activate(const Linear& w) {
        multiply<T, 2>(team_, w, normed_, w_.hidden, b_.rows, [&](int p, int first, int rows, const Tile* tiles) {
            for (int r = 0; r < rows; r++)
                for (int half = 0; half < kPanel; half += kLanes) {
                    const F32 gate = rounded<T>(load(tiles[0].at[r] + half));
                    const F32 up = rounded<T>(load(tiles[1].at[r] + half));
                    const F32 silu = rounded<T>(gate * sigmoid(gate));
                    store(active_ + (first + r) * (int64_t)w_.active + p * kPanel + half, silu * up);
                }
        });
    }

    Team& team_;
    const Model& m_;
    const Pages& pages_;
    const Batch& b_;
    const Widths w_;
    T *x_, *normed_, *fused_, *mixed_, *active_;
    float* scratch_;
};

// Logits [rows, panels of the head * 32], rounded to the element type; columns past the vocabulary are 0.
template <class T>
void logits(Team& team, const Model& m, const T* hidden, int rows, T* out) {
    const int64_t width = (int64_t)m.head.panels * kPanel;
    team.run([&](int) {
        multiply<T>(team, m.head, hidden, m.hidden, rows, [&](int p, int first, int count, const Tile* tiles) {
            for (int r = 0; r < count; r++)
                for (int half = 0; half < kPanel; half += kLanes)
                    store(out + (first + r) * width + p * kPanel + half, biased<T>(m.head, tiles[0], r, p, half));
        });
    });
}

}  // namespace rollout
