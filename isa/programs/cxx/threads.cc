// Threads of the library: futures that hold exceptions, locks, conditions, thread-local objects with destructors.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

std::atomic<int> made{0}, unmade{0};

struct Own {
  Own() : value(1) { ++made; }
  ~Own() { ++unmade; }
  int value;
};
thread_local Own own;
thread_local std::string name = "unnamed " + std::to_string(own.value);

template <typename T> class Queue {
public:
  void put(T value) {
    {
      std::lock_guard lock(mutex);
      all.push_back(std::move(value));
    }
    changed.notify_one();
  }
  T take() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !all.empty(); });
    T value = std::move(all.front());
    all.pop_front();
    if (value < 0)
      throw std::range_error("the queue has ended");
    return value;
  }

private:
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<T> all;
};

int work(int n) {
  own.value += n;
  name += "/" + std::to_string(n);
  if (n % 4 == 3)
    throw std::runtime_error(name);
  int sum = 0;
  for (int i = 0; i < 2000 * n; ++i)
    sum = (sum * 31 + i) % 10007;
  return sum;
}

} // namespace

int main() {
  std::vector<std::future<int>> futures;
  for (int n = 0; n < 12; ++n)
    futures.push_back(std::async(n % 5 == 4 ? std::launch::deferred : std::launch::async, work, n));
  for (auto &future : futures) {
    try {
      std::cout << future.get() << "\n";
    } catch (const std::runtime_error &error) {
      std::cout << "failed: " << error.what() << "\n";
    }
  }

  Queue<int> queue;
  std::mutex sums;
  std::map<std::string, long> sum_of;
  std::vector<std::thread> takers;
  for (int taker = 0; taker < 4; ++taker)
    takers.emplace_back([&, taker] {
      try {
        for (;;) {
          int value = queue.take();
          std::lock_guard lock(sums);
          sum_of[value % 2 ? "odd" : "even"] += value;
        }
      } catch (const std::range_error &) {
        std::lock_guard lock(sums);
        sum_of["ended"] += taker;
      }
    });
  for (int value = 1; value <= 4000; ++value)
    queue.put(value);
  for (size_t taker = 0; taker < takers.size(); ++taker)
    queue.put(-1);
  for (std::thread &taker : takers)
    taker.join();
  for (const auto &[key, sum] : sum_of)
    std::cout << key << " " << sum << "\n";

  std::once_flag once;
  std::atomic<int> tries{0}, failures{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      try {
        std::call_once(once, [&] {
          if (++tries < 3)
            throw std::logic_error("not yet");
        });
      } catch (const std::logic_error &) {
        ++failures;
      }
    });
  for (std::thread &caller : callers)
    caller.join();
  std::cout << tries << " tries, " << failures << " failures\n";

  std::promise<std::string> promise;
  std::shared_future<std::string> shared = promise.get_future().share();
  std::shared_mutex guard;
  std::atomic<int> readers{0};
  std::vector<std::thread> waiters;
  for (int waiter = 0; waiter < 3; ++waiter)
    waiters.emplace_back([&, shared] {
      std::shared_lock lock(guard);
      try {
        shared.get();
      } catch (const std::string &text) {
        readers += static_cast<int>(text.size());
      }
    });
  promise.set_exception(std::make_exception_ptr(std::string("broken")));
  for (std::thread &waiter : waiters)
    waiter.join();
  std::cout << readers << " characters\n";
  try {
    std::future<int> left;
    {
      std::promise<int> abandoned;
      left = abandoned.get_future();
    }
    left.get();
  } catch (const std::future_error &error) {
    std::cout << (error.code() == std::future_errc::broken_promise) << "\n";
  }
  std::cout << made - unmade << " left of the thread-local objects, " << name << "\n";
}
