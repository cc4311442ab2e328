// The Newton–Schulz kernels against the iteration in float64, on the host. Prints a line a case:
// name, relative error.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <newton_schulz/newton_schulz_256_sm90.cuh>
#include <newton_schulz/newton_schulz_sm80.cuh>
#include <newton_schulz/newton_schulz_sm90.cuh>

using namespace fastweights;
using Matrix = std::vector<double>;

constexpr float kEps = 1e-7f;
constexpr int kSteps = 5;

static Coefficients coefficients() {
  Coefficients all{};
  for (auto& step : all.of_step) {
    step[0] = 3.4445f, step[1] = -4.7750f, step[2] = 2.0315f;
  }
  return all;
}

// The iteration on R × C numbers, R ≤ C or not.
static Matrix iterate(Matrix x, int rows, int cols) {
  const auto factors = coefficients();
  double norm = 0;
  for (double v : x) {
    norm += v * v;
  }
  norm = std::sqrt(norm) + kEps;
  for (double& v : x) {
    v /= norm;
  }
  Matrix gram(rows * rows), square(rows * rows), next(rows * cols);
  for (int step = 0; step < kSteps; ++step) {
    const auto& f = factors.of_step[step];
    auto dot = [](const double* a, const double* b, int n) {
      double sum = 0;
      for (int k = 0; k < n; ++k) {
        sum += a[k] * b[k];
      }
      return sum;
    };
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < rows; ++j) {
        gram[i * rows + j] = dot(&x[i * cols], &x[j * cols], cols);
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < rows; ++j) {  // symmetric: rows stand for columns
        square[i * rows + j] =
            f[1] * gram[i * rows + j] + f[2] * dot(&gram[i * rows], &gram[j * rows], rows);
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < cols; ++j) {
        double sum = f[0] * x[i * cols + j];
        for (int k = 0; k < rows; ++k) {
          sum += square[i * rows + k] * x[k * cols + j];
        }
        next[i * cols + j] = sum;
      }
    }
    x = next;
  }
  return x;
}

static float normal() {
  float sum = 0;
  for (int i = 0; i < 12; ++i) {
    sum += std::rand() / float(RAND_MAX) - 0.5f;
  }
  return sum;
}

template <typename T>
struct Stack16 {
  int count, rows, cols;
  std::vector<T> x;

  Stack16(int count, int rows, int cols, float scale)
      : count(count), rows(rows), cols(cols), x(count * rows * cols) {
    for (T& v : x) {
      v = rounded<T>(scale * normal());
    }
  }
  Matrix matrix(int n) const {
    Matrix wide;
    for (int i = 0; i < rows * cols; ++i) {
      wide.push_back(widened(x[n * rows * cols + i]));
    }
    return wide;
  }
};

template <typename T>
static const char* name();
template <>
const char* name<half>() {
  return "fp16";
}
template <>
const char* name<bfloat16>() {
  return "bf16";
}

template <typename T, typename Kernel>
static void forward(const std::string& kernel, int count, int rows, int cols, int threads,
                    int piece, Kernel run) {
  Stack16<T> in(count, rows, cols, 1.0f), out(count, rows, cols, 0.0f);
  for (T& v : out.x) {
    v = {0x7fff};  // NaN
  }
  const auto factors = coefficients();
  run_block(threads, [&] {
    run(in.x.data(), out.x.data(), count, rows, cols, kSteps, kEps, cols % piece == 0, factors);
  });
  double error = 0, norm = 0;
  for (int n = 0; n < count; ++n) {
    const Matrix want = iterate(in.matrix(n), rows, cols), got = out.matrix(n);
    for (size_t i = 0; i < want.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
  }
  std::printf("%s-%dx%d-%s %.3e\n", kernel.c_str(), rows, cols, name<T>(), std::sqrt(error / norm));
}

template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void tiles(int rows, int cols) {
  forward<T>("tiles", 3, rows, cols, 128 * kRowTiles, 8,
             newton_schulz<kRowTiles, kColTiles, kTall, T>);
}
template <bool kTall, typename T>
static void whole(int rows, int cols) {
  forward<T>("256", 1, rows, cols, 512, 8, newton_schulz_256<kTall, T>);
}
template <int kTiles, typename T>
static void small(int rows, int cols) {
  forward<T>("small", 6, rows, cols, 128, 4 * kTiles, newton_schulz_small<kTiles, T>);
}

// ⟨dx, v⟩ against the difference quotient of ⟨dy, iterate(x + h·v)⟩, for random v.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void backward(int rows, int cols, int kept) {
  Stack16<T> x(2, rows, cols, 1.0f), dy(2, rows, cols, 1e-3f), dx(2, rows, cols, 0.0f);
  for (T& v : dx.x) {
    v = {0x7fff};
  }
  const auto factors = coefficients();
  run_block(128 * kRowTiles, [&] {
    newton_schulz_backward<kRowTiles, kColTiles, kTall, T>(x.x.data(), dy.x.data(), dx.x.data(),
                                                           x.count, rows, cols, kSteps, kept, kEps,
                                                           cols % 8 == 0, factors);
  });
  constexpr double kStep = 1e-5;
  double error = 0, norm = 0;
  for (int n = 0; n < x.count; ++n) {
    const Matrix at = x.matrix(n), upstream = dy.matrix(n), grad = dx.matrix(n);
    for (int repeat = 0; repeat < 8; ++repeat) {
      Matrix up = at, down = at;
      double slope = 0, want = 0;
      for (size_t i = 0; i < at.size(); ++i) {
        const double v = normal();
        up[i] += kStep * v;
        down[i] -= kStep * v;
        slope += grad[i] * v;
      }
      up = iterate(up, rows, cols);
      down = iterate(down, rows, cols);
      for (size_t i = 0; i < at.size(); ++i) {
        want += upstream[i] * (up[i] - down[i]) / (2 * kStep);
      }
      error += (slope - want) * (slope - want);
      norm += want * want;
    }
  }
  std::printf("backward-%dx%d-%s-%d %.3e\n", rows, cols, name<T>(), kept, std::sqrt(error / norm));
}

int main() {
  small<1, half>(16, 16);
  small<1, half>(5, 12);
  small<2, half>(32, 32);
  small<2, half>(17, 31);
  small<2, half>(30, 8);
  small<2, bfloat16>(32, 24);
  tiles<1, 1, false, half>(64, 64);
  tiles<1, 1, false, bfloat16>(33, 61);
  tiles<1, 1, true, half>(64, 48);
  tiles<1, 2, false, half>(64, 128);
  tiles<1, 2, true, half>(100, 40);
  tiles<1, 4, true, bfloat16>(256, 64);
  tiles<2, 2, false, half>(72, 128);
  tiles<2, 2, true, half>(120, 96);
  whole<false, half>(256, 256);
  whole<false, bfloat16>(130, 250);
  whole<true, half>(256, 140);
  backward<1, 1, false, half>(48, 64, 5);
  backward<1, 1, false, half>(48, 64, 3);
  backward<1, 1, true, bfloat16>(48, 33, 2);
  backward<1, 2, true, half>(100, 40, 5);
  backward<2, 2, false, half>(66, 70, 4);
  backward<2, 2, true, half>(90, 72, 5);
}
