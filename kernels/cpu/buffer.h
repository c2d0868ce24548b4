// Memory whose content is undefined until it is written.
#pragma once

#include <cstdint>
#include <memory>

namespace servekit {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : data_(new T[count]), count_(count) {}

  // Makes room for `count` elements, whatever becomes of the old ones.
  void require(int64_t count) {
    if (count > count_) *this = Buffer(count);
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  int64_t count_ = 0;
};

}  // namespace servekit
