// What the emulated device (gpu.cpp) offers to the emulated NCCL (nccl.cpp).
#pragma once
#include <ATen/ATen.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace emulated {

constexpr int64_t WITHOUT_END = -1;

using StreamId = int64_t;
using Clock = std::map<StreamId, int64_t>; // a vector clock: how much of every stream's work happened before

// Everything below is called with this lock held. What it finds is told to Python when the lock is released: a thread
// that waits for the interpreter's lock while holding this one could wait forever.
class Lock {
 public:
  Lock();
  ~Lock();
};

// Work that the clocks know of and whose data may not have arrived: a message that waits for another rank.
struct Pending {
  virtual ~Pending() = default;
  // Waits (the caller holds no lock) for so many milliseconds, or without an end; true once it is here.
  virtual bool arrive(int64_t milliseconds) = 0;
  StreamId stream = 0;
  int64_t tick = 0;
};

StreamId current_stream();
bool is_capturing();                          // kernels of the current stream go into a graph
int64_t tick(StreamId stream);                // a kernel starts on the stream
Clock clock_of(StreamId stream);
void wait(StreamId stream, const Clock& until); // later work of the stream starts after `until`
void access(StreamId stream, const at::Tensor& tensor, bool writes, const std::string& kernel);
at::Tensor on_host(const at::Tensor& tensor); // the same memory, as a tensor of the host
void launched(const std::string& kernel);
void add_pending(const std::shared_ptr<Pending>& work);
void remove_pending(const Pending* work);

// Takes the lock by itself: the host blocks until `until` has happened. A thread of its own that blocks (`is_main` is
// false) holds nobody up, and orders nothing that the main one starts.
void block_host(const Clock& until, const std::string& why, bool is_main = true);

// Kernels that run inside the emulation are no kernels of the program.
class Inside {
 public:
  Inside();
  ~Inside();

 private:
  bool before;
};

} // namespace emulated
