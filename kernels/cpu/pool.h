// The compute threads, and loops that they share.
//
// A loop is cut into chunks that any thread takes when it is free, the caller included. So a thread that the operating
// system has put aside holds up a loop by one chunk at most, and one that is not running at all by nothing: on a
// machine with few cores the server and its clients need them too, and a static division would wait for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace servekit {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    is_closing_ = true;
    signal_.fetch_add(1);
    signal_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int64_t num_threads() const { return int64_t(workers_.size()) + 1; }

  // Calls run(context, chunk) for every chunk below `count`, from several threads; returns when all have returned.
  // Callers that come at once take turns.
  void share(void (*run)(void*, int64_t), void* context, uint32_t count) {
    const std::lock_guard<std::mutex> turn(turn_);
    run_ = run;
    context_ = context;
    num_done_.store(0);
    ++generation_;
    ticket_.store(uint64_t(generation_) << 32 | count);
    signal_.fetch_add(1);
    if (num_asleep_.load() > 0) signal_.notify_all();
    while (take_one()) {
    }
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < kSpinsBeforeYield)
        relax();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpinsBeforeYield = 2000;
  static constexpr int kSpinsBeforeSleep = 3000;  // Loops of one step follow each other within some 50 microseconds.

  // The ticket holds the loop's generation and the chunks nobody has taken. Taking one fails if either has changed, so
  // a late thread never touches a loop that is over; a loop is not over while a chunk of it is being run.
  bool take_one() {
    uint64_t ticket = ticket_.load();
    while (uint32_t(ticket) > 0) {
      if (ticket_.compare_exchange_weak(ticket, ticket - 1)) {
        run_(context_, int64_t(uint32_t(ticket)) - 1);
        num_done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  void work() {
    while (!is_closing_) {
      uint32_t seen = signal_.load();
      int spins = 0;
      while (!take_one() && ++spins < kSpinsBeforeSleep) relax();
      if (spins < kSpinsBeforeSleep) continue;
      num_asleep_.fetch_add(1);
      if (uint32_t(ticket_.load()) == 0 && !is_closing_) signal_.wait(seen);
      num_asleep_.fetch_sub(1);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex turn_;
  void (*run_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  uint32_t generation_ = 0;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> num_done_{0};
  std::atomic<uint32_t> signal_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_closing_{false};
};

// The pool of this process. Its size is set before the first operation and not while one runs.
inline std::unique_ptr<Pool>& pool() {
  static auto* instance = new std::unique_ptr<Pool>(new Pool(1));  // Never destroyed: threads may outlive main.
  return *instance;
}

// Parts of a loop for each thread, so that one that started late or was put aside has less to do.
constexpr int64_t kMostPartsEach = 8;

// Calls f(begin, end) for parts of [0, count) of at least `grain` iterations: one part, or as many for each thread.
template <typename F>
void parallel_for(int64_t count, int64_t grain, F f) {
  if (count <= 0) return;
  Pool& threads = *pool();
  const int64_t parts_each = std::min<int64_t>(kMostPartsEach, count / grain / threads.num_threads());
  if (parts_each == 0 || threads.num_threads() == 1) {
    f(int64_t(0), count);
    return;
  }
  const int64_t parts = parts_each * threads.num_threads();
  struct Loop {
    F& f;
    int64_t count, parts;
  } loop{f, count, parts};
  threads.share(
      [](void* context, int64_t index) {
        auto* self = static_cast<Loop*>(context);
        self->f(self->count * index / self->parts, self->count * (index + 1) / self->parts);
      },
      &loop, uint32_t(parts));
}

// Who runs the loops of a computation: all threads together,
struct AllThreads {
  template <typename F>
  void share(int64_t count, int64_t grain, F f) const {
    parallel_for(count, grain, f);
  }
};

// or the calling thread alone, while others do the same for other rows.
struct ThisThread {
  template <typename F>
  void share(int64_t count, int64_t, F f) const {
    if (count > 0) f(int64_t(0), count);
  }
};

}  // namespace servekit
