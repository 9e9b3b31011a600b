#include "thread_team.h"

#include <pthread.h>

#include <memory>
#include <system_error>

namespace offramp {

namespace {

constexpr int kActiveChecks = 4000;  // checks for a next loop before a helper yields: some tens of microseconds

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::atomic<unsigned> fork_number{0};  // how many forks lie between this process and the one that loaded the library

std::atomic<int> open_calls{0};  // calls that compute at the moment, of all models

void note_fork() {
  fork_number.fetch_add(1);
  open_calls.store(0);  // the threads of open calls stayed in the parent
}

struct ForkHandler {
  ForkHandler() { pthread_atfork(nullptr, nullptr, note_fork); }
} const fork_handler;

}  // namespace

thread_local int ThreadTeam::current_thread_ = 0;

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    awake_.store(false);
  }
  wake_up_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadPool::reserve() { return !reserved_.exchange(true); }

void ThreadPool::release() {
  if (awake_.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(false);
  }
  reserved_.store(false);
}

void ThreadPool::wake() {
  if (awake_.load(std::memory_order_relaxed)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(true);
    if (threads_.empty()) {
      try {
        for (int i = 0; i < helpers_; ++i) threads_.emplace_back([this, i] { helper_main(i + 1); });
      } catch (const std::system_error&) {
        // The system gives no more threads: those that started help, or the caller works alone.
      }
    }
  }
  wake_up_.notify_all();
}

void ThreadPool::run(std::size_t count, Function function, const void* context) {
  wake();
  function_ = function;
  context_ = context;
  count_ = count;
  next_.store(0);
  open_.store(true);
  loop_number_.fetch_add(1);
  work_on_loop();
  // A helper announces itself in inside_ before it reads open_, and open_ is closed before inside_ is read here: either
  // the helper sees the closed loop, or it is waited for.
  open_.store(false);
  for (int checks = 0; inside_.load() != 0; ++checks) {
    if (checks < kActiveChecks) pause();
    else std::this_thread::yield();
  }
}

void ThreadPool::work_on_loop() {
  for (std::size_t index = next_.fetch_add(1); index < count_; index = next_.fetch_add(1)) function_(context_, index);
}

void ThreadPool::helper_main(int number) {
  ThreadTeam::current_thread_ = number;
  unsigned last_loop = loop_number_.load() - 1;  // the loop that woke this helper may be open still
  int idle_checks = 0;
  for (;;) {
    if (!awake_.load(std::memory_order_relaxed)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_up_.wait(lock, [this] { return stopping_ || awake_.load(); });
      if (stopping_) return;
      idle_checks = 0;
    }
    const unsigned loop = loop_number_.load(std::memory_order_relaxed);
    if (loop == last_loop) {
      if (++idle_checks < kActiveChecks) pause();
      else std::this_thread::yield();
      continue;
    }
    last_loop = loop;
    idle_checks = 0;
    inside_.fetch_add(1);
    if (open_.load()) work_on_loop();
    inside_.fetch_sub(1);
  }
}

struct PoolOwner::Entry {
  explicit Entry(int helpers) : pool(helpers), fork(fork_number.load()) {}
  ThreadPool pool;
  const unsigned fork;
};

PoolOwner::~PoolOwner() {
  Entry* entry = entry_.load();
  // Threads of another process cannot be joined: what a forked child inherited is left alone.
  if (entry != nullptr && entry->fork == fork_number.load()) delete entry;
}

ThreadPool* PoolOwner::pool() {
  if (threads_ == 1) return nullptr;
  Entry* entry = entry_.load();
  if (entry == nullptr || entry->fork != fork_number.load()) {
    auto fresh = std::make_unique<Entry>(threads_ - 1);
    if (entry_.compare_exchange_strong(entry, fresh.get())) entry = fresh.release();
  }
  return &entry->pool;
}

ThreadTeam::ThreadTeam(PoolOwner& owner) : pool_(owner.pool()) {
  // Several calls at a time already fill the cores: helpers would only take them from another call.
  const bool alone = open_calls.fetch_add(1) == 0;
  if (pool_ != nullptr && !(alone && pool_->reserve())) pool_ = nullptr;
}

ThreadTeam::~ThreadTeam() {
  if (pool_ != nullptr) pool_->release();
  open_calls.fetch_sub(1);
}

}  // namespace offramp
