// Draws one token for every row of logits: bans, temperature, top-k, top-p, then the Gumbel-max trick.
//
// Same distribution and noise as rollout.engine.sampling. The winner has the largest p / E, where E is a standard
// exponential variate: that is the largest log p - log E without the second logarithm. Rows are independent; what a
// row may not draw becomes -inf in its logits, which are scratch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vector.h"

namespace rollout {

struct Draws {
    int32_t rows, vocabulary;
    int64_t stride;              // elements from row to row
    const int32_t* id_bits;      // [vocabulary + kLanes]
    const float* temperatures;   // 0: greedy
    const int32_t* top_k;        // 0: all
    const double* top_p;         // 1: all
    const int32_t* keys;         // [rows, 2]
    const int32_t* ban_offsets;  // [rows + 1]
    const int32_t* bans;
    int64_t* ids;
    float* logprobs;
};

constexpr int kBuckets = 1 << 16;

// What one thread counts in.
struct Histogram {
    uint32_t count[kBuckets];
    double mass[kBuckets];

    void clear() { std::memset(this, 0, sizeof *this); }
};

ROLLOUT_INLINE float element(const float* from) { return *from; }

ROLLOUT_INLINE float element(const Bf16* from) {
    const uint32_t bits = (uint32_t)from->bits << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

ROLLOUT_INLINE void forbid(float* at) { *at = -kInfinity; }
ROLLOUT_INLINE void forbid(Bf16* at) { at->bits = 0xff80; }

// All bits of an element, so that larger numbers have larger keys; both zeros have one, and NaN has the largest.
ROLLOUT_INLINE uint32_t order_key(const float* from) {
    const float x = *from + 0.0f;
    if (x != x) return 0xffffffffu;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

ROLLOUT_INLINE uint32_t order_key(const Bf16* from) {
    const float x = element(from);
    return order_key(&x) >> 16;
}

// Constants: Wellons, hash-prospector, `lowbias32` without its last step.
ROLLOUT_INLINE U32 scramble(U32 bits) {
    bits = (bits ^ (bits >> 16)) * 0x7feb352du;
    return (bits ^ (bits >> 15)) * 0x846ca68bu;
}

// Uniform variates above 0 and below 1.
ROLLOUT_INLINE F32 uniforms(const int32_t* id_bits, const int32_t* keys) {
    const U32 bits = scramble((load_as<U32>(id_bits) ^ (uint32_t)keys[0]) + (uint32_t)keys[1]) & 0x7fffffffu;
    const float unit = (1.0f - 0x1p-24f) * 0x1p-31f;  // also those that fp32 rounds up stay below 1
    return (__builtin_convertvector((I32)bits, F32) + 0.5f) * unit;
}

template <class T>
class RowSampler {
   public:
    RowSampler(const Draws& draws, int row, T* logits, Histogram& histogram)
        : d_(draws), row_(row), x_(logits), histogram_(histogram), temperature_(draws.temperatures[row]) {}

    void draw() {
        for (int i = d_.ban_offsets[row_]; i < d_.ban_offsets[row_ + 1]; i++) forbid(x_ + d_.bans[i]);
        top_ = -kInfinity;
        F32 top = splat(-kInfinity);
        each_vector(d_.vocabulary, [&](int i, int n) { top = larger(at(i, n), top); });
        top_ = largest(top);
        const bool greedy = temperature_ == 0.0f;
        // Below the smallest normal number the best token would be 0 / 0.
        scale_ = greedy ? 1.0f : 1.0f / std::fmax(temperature_, 0x1p-126f);
        if (!greedy) {
            if (d_.top_k[row_] && d_.top_k[row_] < d_.vocabulary)
                truncate([&](const Bucket&) { return 1.0; }, d_.top_k[row_]);
            if (d_.top_p[row_] < 1.0) truncate([&](const Bucket& b) { return b.mass / b.count; }, -d_.top_p[row_]);
        }
        if (greedy)
            pick([](int, F32 logit, F32, float) { return logit; });
        else
            pick([&](int i, F32, F32 weight, float best) {
                const F32 uniform = uniforms(d_.id_bits + i, d_.keys + 2 * row_);
                // E = -log(1 - uniform) is larger than the uniform variate itself, which most often decides it.
                const F32 bound = weight * (1.0f + 0x1p-20f) - best * uniform;
                return any(bound > 0.0f) ? weight / -log_one_minus(uniform) : splat(-1.0f);
            });
    }

   private:
    struct Bucket {
        uint32_t count;
        double mass;
    };

    F32 at(int i, int n) const {
        const F32 x = load_up_to(x_ + i, n);
        return n == kLanes ? x : (lane_ids() < n ? x : splat(-kInfinity));
    }

    F32 scaled(F32 x) const { return (x - top_) * scale_; }

    // The id with the largest score, of equals the lowest, and its log-probability. A score below the largest one so
    // far, which it is told, may be any number below that.
    template <class Score>
    void pick(Score score) {
        int id = 0;
        float best = -kInfinity;
        double total = 0;
        F32 part{};
        int since = 0;
        each_vector(d_.vocabulary, [&](int i, int n) {
            const F32 x = at(i, n), weight = exp(scaled(x)), s = score(i, x, weight, best);
            if (any(s > best)) {
                for (int lane = 0; lane < n; lane++)
                    if (s[lane] > best) {
                        best = s[lane];
                        id = i + lane;
                    }
            }
            part += weight;
            if (++since == 64) {  // so that small weights are not lost in a large sum
                total += sum(part);
                part = F32{};
                since = 0;
            }
        });
        total += sum(part);
        d_.ids[row_] = id;
        d_.logprobs[row_] = (float)((double)((element(x_ + id) - top_) * scale_) - std::log(total));
    }

    // Keep the best tokens, by (logit descending, id ascending), until the weights of those kept reach `wanted`;
    // a negative one is a share of the weight of all. Finds the last one's key sixteen bits at a time.
    template <class Weight>
    void truncate(Weight weight, double wanted) {
        uint32_t cut = 0, keep = 0;
        double before = 0;
        for (int shift = 8 * sizeof(T) - 16; shift >= 0; shift -= 16) {
            const double all = count_keys(shift, cut);
            if (wanted < 0) wanted *= -all;
            int bucket = kBuckets - 1, last = -1;
            for (; bucket >= 0; bucket--) {
                const Bucket b{histogram_.count[bucket], histogram_.mass[bucket]};
                if (!b.count) continue;
                last = bucket;
                const double here = weight(b) * b.count;
                if (before + here >= wanted) break;
                before += here;
            }
            if (last < 0) return;  // nothing but NaN
            if (bucket < 0) {      // rounding only: all are kept
                bucket = last;
                before = -1e300;
            }
            cut = cut << 16 | (uint32_t)bucket;
            const Bucket b{histogram_.count[bucket], histogram_.mass[bucket]};
            const double needed = std::ceil((wanted - before) / weight(b));
            keep = needed >= b.count ? b.count : needed < 1 ? 1 : (uint32_t)needed;
        }
        for (int i = 0; i < d_.vocabulary; i++) {
            const uint32_t key = order_key(x_ + i);
            if (key > cut || (key == cut && keep && keep--)) continue;
            forbid(x_ + i);
        }
    }

    // Fill the histogram with sixteen bits of every key that begins with `prefix`; the mass of all of them.
    double count_keys(int shift, uint32_t prefix) {
        histogram_.clear();
        double all = 0;
        each_vector(d_.vocabulary, [&](int i, int n) {
            float mass[kLanes];
            store(mass, exp(scaled(at(i, n))));
            for (int lane = 0; lane < n; lane++) {
                const uint32_t key = order_key(x_ + i + lane) >> shift;
                if (!(mass[lane] > 0) || key >> 16 != prefix) continue;
                histogram_.count[key & 0xffff]++;
                histogram_.mass[key & 0xffff] += mass[lane];
                all += mass[lane];
            }
        });
        return all;
    }

    const Draws& d_;
    const int row_;
    T* const x_;
    Histogram& histogram_;
    const float temperature_;
    float top_ = 0, scale_ = 1;
};

template <class T>
void sample(Team& team, const Draws& draws, T* logits, Histogram* histograms) {
    team.run([&](int member) {
        team.share(draws.rows, [&](int r) {
            RowSampler<T>(draws, r, logits + r * draws.stride, histograms[member]).draw();
        });
    });
}

}  // namespace rollout
