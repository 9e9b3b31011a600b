// Threads that help one call at a time.
//
// Helpers sleep on a condition variable between calls. While a call runs they wait for its next loop actively, because a
// loop often takes only some microseconds; after a while without work they yield. The caller never waits for a helper
// that has not started: indices are handed out one by one, so a helper that the system has not scheduled costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace offramp {

class ThreadPool {
 public:
  explicit ThreadPool(int helpers) : helpers_(helpers) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  friend class ThreadTeam;
  using Function = void (*)(const void* context, std::size_t index);

  bool reserve();
  void release();
  void wake();
  void run(std::size_t count, Function function, const void* context);
  void work_on_loop();
  void helper_main(int number);

  const int helpers_;
  std::vector<std::thread> threads_;
  std::atomic<bool> reserved_{false};  // some call owns the helpers
  std::mutex mutex_;
  std::condition_variable wake_up_;
  std::atomic<bool> awake_{false};  // helpers should wait actively; changed under the mutex
  bool stopping_ = false;           // under the mutex

  // The current loop. Its fields change only while no helper is inside.
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::size_t count_ = 0;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> open_{false};
  std::atomic<unsigned> loop_number_{0};
  std::atomic<int> inside_{0};
};

// The helpers of a model, created when first needed, and again in a process that was forked.
class PoolOwner {
 public:
  explicit PoolOwner(int threads) : threads_(threads < 1 ? 1 : threads) {}
  ~PoolOwner();
  PoolOwner(const PoolOwner&) = delete;
  PoolOwner& operator=(const PoolOwner&) = delete;
  int threads() const { return threads_; }
  ThreadPool* pool();  // nullptr: the caller alone

 private:
  struct Entry;
  const int threads_;
  std::atomic<Entry*> entry_{nullptr};
};

// What one call computes with: the helpers if no other call computes as it begins, otherwise the calling thread alone.
class ThreadTeam {
 public:
  explicit ThreadTeam(PoolOwner& owner);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  int threads() const { return pool_ == nullptr ? 1 : pool_->helpers_ + 1; }
  // Inside a loop: the number of the thread that runs, 0 (the caller) … threads() - 1, for memory of its own.
  static int current() { return current_thread_; }

  // Calls body(index) for every index below count, in any order and on any thread; returns when all are done. The body
  // must not throw.
  template <class Body>
  void for_each(std::size_t count, const Body& body) {
    if (pool_ == nullptr || count < 2) {
      for (std::size_t index = 0; index < count; ++index) body(index);
      return;
    }
    pool_->run(count, [](const void* context, std::size_t index) { (*static_cast<const Body*>(context))(index); },
               &body);
  }

 private:
  friend class ThreadPool;
  static thread_local int current_thread_;
  ThreadPool* pool_;
};

}  // namespace offramp
