// Threads that run one job together, phase by phase: they claim pieces of a phase until it is used up, and meet at a
// barrier. Who computes a piece never shows in its result. They sleep between jobs, and after a short spin at a
// barrier, so that a thread that lost its core is not starved by those that wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

namespace rollout {

class Team {
   public:
    explicit Team(int size) : size_(size) {
        for (int member = 1; member < size; member++) threads_.emplace_back([this, member] { serve(member); });
    }

    ~Team() {
        stopped_.store(true, std::memory_order_relaxed);
        advance(jobs_);
        for (auto& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;

    int size() const { return size_; }

    // Run job(member) on every thread, the caller's included. Ends the process if another caller's job is running.
    void run(const std::function<void(int)>& job) {
        if (busy_.test_and_set(std::memory_order_acquire)) {
            std::fputs("rollout: two threads called native kernels of one team at once\n", stderr);
            std::abort();
        }
        job_ = &job;
        claimed_.store(0, std::memory_order_relaxed);
        advance(jobs_);
        job(0);
        barrier();
        busy_.clear(std::memory_order_release);
    }

    // The first piece that nobody else has.
    int claim() { return claimed_.fetch_add(1, std::memory_order_relaxed); }

    // Calls piece(i) for 0 <= i < n, each on whichever thread comes first, and waits for all.
    template <class F>
    void share(int n, F piece) {
        for (int i; (i = claim()) < n;) piece(i);
        barrier();
    }

    // Wait for all; the next phase's pieces can be claimed.
    void barrier() {
        const uint32_t phase = phases_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return await(phases_, phase);
        arrived_.store(0, std::memory_order_relaxed);
        claimed_.store(0, std::memory_order_relaxed);
        advance(phases_);
    }

   private:
    static constexpr int kSpins = 4000;

    void serve(int member) {
        uint32_t seen = 0;
        for (;;) {
            await(jobs_, seen);
            seen++;
            if (stopped_.load(std::memory_order_relaxed)) return;
            (*job_)(member);
            barrier();
        }
    }

    static void advance(std::atomic<uint32_t>& count) {
        count.fetch_add(1, std::memory_order_acq_rel);
        count.notify_all();
    }

    static void await(std::atomic<uint32_t>& count, uint32_t seen) {
        for (int spin = 0; spin < kSpins; spin++) {
            if (count.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        while (count.load(std::memory_order_acquire) == seen) count.wait(seen, std::memory_order_acquire);
    }

    const int size_;
    const std::function<void(int)>* job_ = nullptr;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopped_{false};
    std::atomic_flag busy_;
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<uint32_t> phases_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> claimed_{0};
};

}  // namespace rollout
