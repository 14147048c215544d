// NCCL for the emulated GPU: messages over gloo, between tensors that claim to be on a GPU, with NCCL's refusals and
// NCCL's order: a message runs on the communicator's stream, starts after the stream that issues it, and its values
// arrive when somebody waits. What reads them without that reads NaN, or the values of before. The messages of a
// communicator run one after another as they were issued (those of a batch at once), and a send ends no earlier than its
// receive begins: ranks that send to each other in turn hang, as they do on GPUs.
#include "gpu.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

namespace py = pybind11;
using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Works = std::vector<c10::intrusive_ptr<Work>>;

namespace emulated {
namespace {

int64_t patience = 600'000;  // milliseconds that a stream may wait for a message; the host runs ahead after that
int64_t num_communicators = 0;
std::vector<std::tuple<int64_t, std::string, int64_t, bool>> issued; // (communicator, kind, bytes sent, is async)

// What one kernel of NCCL does: a message, or several that were batched.
struct Transfer final : Pending {
  std::vector<std::function<Works()>> starts; // of gloo, called once it is its turn
  std::vector<std::function<void()>> lands;
  Clock end;
  std::shared_ptr<bool> is_aborted;

  // On the thread of the communicator. A lost connection ends no kernel of NCCL: only an abort does.
  void run() {
    Works works;
    for (const auto& start : starts)
      for (auto& work : start()) works.push_back(work);
    for (const auto& work : works) work->wait();
    std::lock_guard<std::mutex> guard(mutex);
    is_done = true;
    done.notify_all();
  }

  bool arrive(int64_t milliseconds) override {
    {
      std::unique_lock<std::mutex> guard(mutex);
      const auto began = std::chrono::steady_clock::now();
      while (!is_done && !*is_aborted) {
        const auto passed = std::chrono::steady_clock::now() - began;
        if (milliseconds != WITHOUT_END && passed >= std::chrono::milliseconds(milliseconds)) return false;
        done.wait_for(guard, std::chrono::milliseconds(10)); // an abort notifies nobody
      }
    }
    std::lock_guard<std::mutex> guard(landing);
    if (!*is_aborted) {
      Inside inside;
      at::NoGradGuard no_grad;
      for (const auto& land : std::exchange(lands, {})) land();
    }
    remove_pending(this);
    return true;
  }

 private:
  std::mutex mutex, landing;
  std::condition_variable done;
  bool is_done = false;
};

// The messages of a communicator, which a thread runs one after another.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  void push(std::shared_ptr<Transfer> transfer) {
    std::lock_guard<std::mutex> guard(mutex);
    waiting.push_back(std::move(transfer));
    changed.notify_one();
    if (!std::exchange(is_running, true)) std::thread([self = shared_from_this()] { self->run(); }).detach();
  }

 private:
  void run() {
    for (;;) {
      std::shared_ptr<Transfer> next;
      {
        std::unique_lock<std::mutex> guard(mutex);
        changed.wait(guard, [&] { return !waiting.empty(); });
        next = std::move(waiting.front());
        waiting.pop_front();
      }
      try {
        next->run();
      } catch (const std::exception&) {
        return; // the connection is lost: this message never ends, and none after it begins
      }
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Transfer>> waiting;
  bool is_running = false;
};

class Message final : public Work {
 public:
  Message(std::shared_ptr<Transfer> transfer, Tensors tensors, bool is_sent_only, bool blocks_host)
      : transfer(std::move(transfer)),
        tensors(std::move(tensors)),
        is_sent_only(is_sent_only),
        blocks_host(blocks_host) {}
  bool wait(std::chrono::milliseconds) override {
    if (blocks_host) {
      block_host(transfer->end, "barrier");
    } else {
      emulated::wait(current_stream(), transfer->end);
      if (!is_sent_only) transfer->arrive(patience); // whoever reads nothing of it runs ahead
    }
    held.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return transfer->arrive(0); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors));
    return future;
  }

 private:
  std::shared_ptr<Transfer> transfer;
  Tensors tensors, held = tensors; // what a message uses stays until somebody has waited
  bool is_sent_only, blocks_host;
};

const std::set<at::ScalarType> SENT{
    at::kChar, at::kByte,     at::kInt,  at::kLong,          at::kHalf,        at::kFloat,
    at::kDouble, at::kBFloat16, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2};

void check(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense");
    TORCH_CHECK_TYPE(SENT.count(tensor.scalar_type()), "Unconvertible NCCL type ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  }
}

Tensor bytes_of(const Tensor& tensor) {
  Tensor host = on_host(tensor);
  return at::from_blob(host.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, [host](void*) {}, at::kByte);
}

Tensor reduced(const Tensor& rows, const c10d::ReduceOp& op) {
  const Tensor wide = rows.scalar_type() == at::kBool ? rows.to(at::kByte) : rows;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG: {
      Tensor sum = wide[0].clone();
      for (int64_t i = 1; i < wide.size(0); i++) sum.add_(wide[i]);
      return op.op_ == c10d::ReduceOp::AVG ? sum.div_(wide.size(0)) : sum;
    }
    case c10d::ReduceOp::PRODUCT:
      return wide.prod(0, false, wide.scalar_type());
    case c10d::ReduceOp::MIN:
      return wide.amin(0);
    case c10d::ReduceOp::MAX:
      return wide.amax(0);
    default:
      TORCH_CHECK(false, "Cannot use ReduceOp.", static_cast<int>(op.op_), " with NCCL");
  }
}

class Nccl final : public c10d::Backend {
  // The messages that one kernel sends.
  struct Batch {
    std::string kind;
    Tensors ins, outs;
    std::vector<std::function<Works()>> starts;
    std::vector<std::function<void()>> lands;
  };

 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo(std::move(gloo)), number(++num_communicators) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  void startCoalescing() override { collected.emplace(); }
  c10::intrusive_ptr<Work> endCoalescing() override {
    Batch batch = std::move(*std::exchange(collected, std::nullopt));
    return batch.kind.empty() ? nullptr : launch(std::move(batch), true, false);
  }
  void abort() override { *is_aborted = true; }
  void shutdown() override { *is_aborted = true; }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensor tensor = tensors.at(0);
    return send("all_reduce", {tensor}, {tensor}, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, tensor);
      batch.lands.push_back([=] { on_host(tensor).copy_(reduced(rows, options.reduceOp)); });
    });
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensor tensor = tensors.at(0);
    return send("reduce", {tensor}, {tensor}, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, tensor);
      const bool is_root = options.rootRank == getRank();
      batch.lands.push_back([=] { if (is_root) on_host(tensor).copy_(reduced(rows, options.reduceOp)); });
    });
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_TYPE(out.scalar_type() == in.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(out.numel() == in.numel() * getSize(), "output tensor size must be equal to world_size times input");
    return send("all_gather", {in}, {out}, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, in);
      batch.lands.push_back([=] { on_host(out).view(-1).copy_(rows.view(-1)); });
    });
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outs, Tensors& ins,
                                     const c10d::AllgatherOptions& options) override {
    Tensors out = outs.at(0);
    return send("all_gather", ins, out, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, ins.at(0));
      batch.lands.push_back([=] {
        for (size_t i = 0; i < out.size(); i++) on_host(out[i]).copy_(rows[i]);
      });
    });
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_TYPE(out.scalar_type() == in.scalar_type(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(in.numel() == out.numel() * getSize(), "input tensor must be the same size as output size times world size");
    return send("reduce_scatter", {in}, {out}, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, in);
      const auto rank = getRank(), size = getSize();
      batch.lands.push_back([=] {
        auto mine = rows.view({size, size, out.numel()}).select(1, rank);
        on_host(out).view(-1).copy_(reduced(mine, options.reduceOp));
      });
    });
  }

  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                           const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < ins.size(); i++) _allgather_base(outs[i], ins[i], options);
    return endCoalescing();
  }

  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                           const c10d::ReduceScatterOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < ins.size(); i++) _reduce_scatter_base(outs[i], ins[i], options);
    return endCoalescing();
  }

  c10::intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                                         std::vector<int64_t>& in_splits,
                                         const c10d::AllToAllOptions& options) override {
    auto counts = [&](const Tensor& tensor, const std::vector<int64_t>& splits) {
      const int64_t length = tensor.dim() ? tensor.size(0) : 0;
      std::vector<int64_t> all = splits.empty() ? std::vector<int64_t>(getSize(), length / getSize()) : splits;
      TORCH_CHECK(std::accumulate(all.begin(), all.end(), int64_t(0)) == length, "Split sizes doesn't match total dim 0 size");
      for (auto& count : all) count *= length ? static_cast<int64_t>(tensor.nbytes()) / length : 0;
      return all;
    };
    auto received = counts(out, out_splits), sent = counts(in, in_splits);
    return send("all_to_all", {in}, {out}, options.asyncOp, [&](Batch& batch) {
      Tensor from = bytes_of(in).clone(), to = at::empty({static_cast<int64_t>(out.nbytes())}, at::kByte);
      batch.starts.push_back([=, this]() mutable -> Works { return {gloo->alltoall_base(to, from, received, sent)}; });
      batch.lands.push_back([=] { bytes_of(out).copy_(to); });
    });
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensor tensor = tensors.at(0);
    const bool is_root = options.rootRank == getRank();
    auto issue = [&](Batch& batch) {
      Tensors wire{bytes_of(tensor).clone()};
      c10d::BroadcastOptions same;
      same.rootRank = options.rootRank;
      batch.starts.push_back([=, this]() mutable -> Works { return {gloo->broadcast(wire, same)}; });
      batch.lands.push_back([=] { bytes_of(tensor).copy_(wire[0]); });
    };
    return send("broadcast", is_root ? Tensors{tensor} : Tensors{}, is_root ? Tensors{} : Tensors{tensor}, options.asyncOp, issue);
  }

  c10::intrusive_ptr<Work> scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    Tensor out = outs.at(0);
    const bool is_root = options.rootRank == getRank();
    return send("scatter", is_root ? ins.at(0) : Tensors{}, {out}, options.asyncOp, [&](Batch& batch) {
      Tensors wire{at::empty({static_cast<int64_t>(out.nbytes())}, at::kByte)};
      std::vector<Tensors> parts;
      if (is_root) parts.push_back(Tensors{});
      if (is_root) for (const Tensor& part : ins.at(0)) parts[0].push_back(bytes_of(part).clone());
      c10d::ScatterOptions same;
      same.rootRank = options.rootRank;
      batch.starts.push_back([=, this]() mutable -> Works { return {gloo->scatter(wire, parts, same)}; });
      batch.lands.push_back([=] { bytes_of(out).copy_(wire[0]); });
    });
  }

  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    const bool is_root = options.rootRank == getRank();
    Tensors out = is_root ? outs.at(0) : Tensors{};
    return send("gather", ins, out, options.asyncOp, [&](Batch& batch) {
      auto rows = gather(batch, ins.at(0));
      batch.lands.push_back([=] {
        for (size_t i = 0; i < out.size(); i++) on_host(out[i]).copy_(rows[i]);
      });
    });
  }

  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return send("send", tensors, {}, true, [&](Batch& batch) {
      Tensors wire{bytes_of(tensors.at(0)).clone()}, begun{at::empty({1}, at::kByte)};
      batch.starts.push_back([=, this]() mutable -> Works {
        return {gloo->send(wire, to, tag), gloo->recv(begun, to, tag | HAS_BEGUN)};
      });
    });
  }

  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    Tensor tensor = tensors.at(0);
    return send("recv", {}, tensors, true, [&](Batch& batch) {
      Tensors wire{at::empty({static_cast<int64_t>(tensor.nbytes())}, at::kByte)};
      batch.starts.push_back([=, this]() mutable -> Works {
        Tensors begun{at::zeros({1}, at::kByte)};
        return {gloo->recv(wire, from, tag), gloo->send(begun, from, tag | HAS_BEGUN)};
      });
      batch.lands.push_back([=] { bytes_of(tensor).copy_(wire[0]); });
    });
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    auto issue = [&](Batch& batch) {
      batch.starts.push_back([this]() -> Works { return {gloo->barrier()}; });
    };
    return send("barrier", {}, {}, true, issue, true);
  }

 private:
  // Start to gather the tensors of all ranks: the rows, once the transfer has arrived.
  Tensor gather(Batch& batch, const Tensor& tensor) {
    std::vector<int64_t> shape{getSize()};
    shape.insert(shape.end(), tensor.sizes().begin(), tensor.sizes().end());
    Tensor rows = at::empty(shape, tensor.options().device(at::kCPU));
    Tensor from = bytes_of(tensor).clone(), to = bytes_of(rows);
    if (from.numel())
      batch.starts.push_back([=, this]() mutable -> Works { return {gloo->_allgather_base(to, from)}; });
    return rows;
  }

  template <typename Issue>
  c10::intrusive_ptr<Work> send(const std::string& kind, const Tensors& ins, const Tensors& outs, bool is_async,
                                const Issue& issue, bool blocks_host = false) {
    check(ins);
    check(outs);
    Batch alone;
    Batch& batch = collected.has_value() ? *collected : alone;
    batch.kind += (batch.kind.empty() ? "" : " + ") + kind;
    batch.ins.insert(batch.ins.end(), ins.begin(), ins.end());
    batch.outs.insert(batch.outs.end(), outs.begin(), outs.end());
    {
      Inside inside;
      at::NoGradGuard no_grad;
      issue(batch);
    }
    return collected.has_value() ? nullptr : launch(std::move(alone), is_async, blocks_host);
  }

  c10::intrusive_ptr<Work> launch(Batch batch, bool is_async, bool blocks_host) {
    TORCH_CHECK(!is_capturing(), "NCCL: the emulated GPU captures no messages");
    auto transfer = std::make_shared<Transfer>();
    transfer->is_aborted = is_aborted;
    const StreamId current = current_stream(), stream = is_async ? FIRST_STREAM + number : current;
    {
      Lock lock;
      if (is_async) emulated::wait(stream, clock_of(current));
      launched(batch.kind);
      transfer->stream = stream;
      transfer->tick = tick(stream);
      for (const Tensor& tensor : batch.ins) access(stream, tensor, false, batch.kind);
      for (const Tensor& tensor : batch.outs) access(stream, tensor, true, batch.kind);
      transfer->end = clock_of(stream);
      int64_t bytes = 0;
      for (const Tensor& tensor : batch.ins) bytes += tensor.nbytes();
      issued.emplace_back(number, batch.kind, bytes, is_async);
    }
    transfer->starts = std::move(batch.starts);
    transfer->lands = std::move(batch.lands);
    add_pending(transfer);
    queue->push(transfer);
    const bool is_sent_only = batch.outs.empty();
    Tensors all = std::move(batch.ins);
    all.insert(all.end(), batch.outs.begin(), batch.outs.end());
    auto message = c10::make_intrusive<Message>(transfer, all, is_sent_only, blocks_host);
    if (!is_async) transfer->arrive(patience); // the next kernel of this stream reads it
    return message;
  }

  static constexpr StreamId FIRST_STREAM = 1000;
  static constexpr int HAS_BEGUN = 1 << 30; // the tag that tells a sender that its receive has begun
  c10::intrusive_ptr<c10d::Backend> gloo;
  const int64_t number;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::optional<Batch> collected; // between startCoalescing and endCoalescing
  std::shared_ptr<bool> is_aborted = std::make_shared<bool>(false);
};

} // namespace

void bind_nccl(py::module_& module) {
  py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(module, "Nccl", py::dynamic_attr())
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
  module.def("set_patience", [](int64_t milliseconds) { patience = milliseconds; });
  module.def("issued", [] { return issued; });
  module.def("forget_issued", [] { issued.clear(); });
}

} // namespace emulated
