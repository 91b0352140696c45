// Ops of `shm_collectives/cpu.h` for torch. A segment is a tensor of bytes that all members have mapped.
#pragma once

#include <vector>

#include "native/binding.h"
#include "shm_collectives/cpu.h"

namespace moeserve::shm {

inline Element element_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Element::kFloat32;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kFloat16;
    case at::kLong:
      return Element::kInt64;
    default:
      TORCH_CHECK(false, "no sum over members for ", tensor.scalar_type());
  }
}

inline std::vector<int64_t> bytes_of_rows(const at::Tensor& tensor, at::IntArrayRef counts) {
  int64_t row_bytes = tensor.element_size(), num_rows = 0;
  for (int64_t dim = 1; dim < tensor.dim(); dim++) row_bytes *= tensor.size(dim);
  std::vector<int64_t> bytes;
  for (const int64_t count : counts) {
    bytes.push_back(count * row_bytes);
    num_rows += count;
  }
  TORCH_CHECK(num_rows == tensor.size(0), num_rows, " rows are counted, there are ", tensor.size(0));
  return bytes;
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("shm_segment_bytes(int size, int slot_bytes) -> int", &segment_bytes);

  m.def("shm_create(Tensor(a!) segment, int size, int slot_bytes, float timeout_s, float spin_s) -> ()",
        [](const at::Tensor& segment, int64_t size, int64_t slot_bytes, double timeout_s, double spin_s) {
          TORCH_CHECK(0 < size && size <= kMaxMembers, "a segment has 1 to ", kMaxMembers, " members, not ", size);
          TORCH_CHECK(slot_bytes >= kMinSlotBytes && slot_bytes % 64 == 0, "slots of ", slot_bytes, " bytes");
          create(segment.mutable_data_ptr(), size, slot_bytes, timeout_s, spin_s);
        });

  m.def("shm_join(Tensor(a!) segment, int rank) -> ()",
        [](const at::Tensor& segment, int64_t rank) { join(segment.mutable_data_ptr(), rank); });

  m.def("shm_barrier(Tensor(a!) segment, int rank) -> int",
        [](const at::Tensor& segment, int64_t rank) { return barrier(segment.mutable_data_ptr(), rank); });

  m.def("shm_all_reduce(Tensor(a!) segment, int rank, Tensor(b!) x) -> int",
        [](const at::Tensor& segment, int64_t rank, const at::Tensor& x) {
          check_dense(x, "x");
          return all_reduce(segment.mutable_data_ptr(), rank, x.mutable_data_ptr(), x.numel(), element_of(x));
        });

  m.def("shm_all_gather(Tensor(a!) segment, int rank, Tensor[] x, Tensor(b!)[] out) -> int",
        [](const at::Tensor& segment, int64_t rank, at::TensorList x, at::TensorList out) {
          TORCH_CHECK(x.size() == out.size());
          std::vector<Gathered> parts;
          for (size_t i = 0; i < x.size(); i++) {
            check_dense(x[i], "x");
            check_dense(out[i], "out");
            parts.push_back({x[i].const_data_ptr(), out[i].mutable_data_ptr(), static_cast<int64_t>(x[i].nbytes())});
          }
          return all_gather(segment.mutable_data_ptr(), rank, parts);
        });

  m.def("shm_all_to_all(Tensor(a!) segment, int rank, Tensor x, int[] send_counts, Tensor(b!) out, int[] receive_counts)"
        " -> int",
        [](const at::Tensor& segment, int64_t rank, const at::Tensor& x, at::IntArrayRef send_counts,
           const at::Tensor& out, at::IntArrayRef receive_counts) {
          check_dense(x, "x");
          check_dense(out, "out");
          const std::vector<int64_t> send_bytes = bytes_of_rows(x, send_counts);
          const std::vector<int64_t> receive_bytes = bytes_of_rows(out, receive_counts);
          return all_to_all(segment.mutable_data_ptr(), rank, x.const_data_ptr(), send_bytes.data(),
                            out.mutable_data_ptr(), receive_bytes.data());
        });

  m.def("shm_reduce_scatter(Tensor(a!) segment, int rank, Tensor x, Tensor(b!) out) -> int",
        [](const at::Tensor& segment, int64_t rank, const at::Tensor& x, const at::Tensor& out) {
          check_dense(x, "x");
          check_dense(out, "out");
          return reduce_scatter(segment.mutable_data_ptr(), rank, x.const_data_ptr(), out.mutable_data_ptr(), out.numel(),
                                element_of(out));
        });
}

}  // namespace moeserve::shm
