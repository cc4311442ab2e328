// The Newton–Schulz kernels against the iteration in float64, on the host. Prints a line a case:
// name, relative error, the limit of it. Fails if an error is above its limit.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <newton_schulz/newton_schulz_256_sm90.cuh>
#include <newton_schulz/newton_schulz_sm80.cuh>
#include <newton_schulz/newton_schulz_sm90.cuh>
#include <newton_schulz/newton_schulz_stack_sm80.cuh>

using namespace fastweights;
using Matrix = std::vector<double>;

constexpr float kEps = 1e-7f;
constexpr int kSteps = 5;

// Five steps of fp16 products are 1.1e-3 to 2.7e-3 off.
constexpr double kForward = 4e-3;
// A gradient that is compared along a few directions only scatters.
constexpr double kAlongDirections = 1e-2;
// The same gradient in float64, but with all that is kept rounded to fp16, is 5e-3 off on 16 × 16
// (median of 200), 4e-3 on 32 × 32.
constexpr double kGradient = 8e-3;

static int failures = 0;

static void report(const std::string& name, double error, double limit) {
  std::printf("%s %.3e %.0e\n", name.c_str(), error, limit);
  failures += !(error < limit);
}

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

template <typename T>
static std::string label(const std::string& kernel, int rows, int cols) {
  return kernel + "-" + std::to_string(rows) + "x" + std::to_string(cols) + "-" + name<T>();
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
  report(label<T>(kernel, rows, cols), std::sqrt(error / norm), kForward);
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
  report(label<T>("backward", rows, cols) + "-" + std::to_string(kept), std::sqrt(error / norm),
         kAlongDirections);
}

// Gradient of ⟨dy, iterate(x)⟩ by the chain rule, step by step; zeros for a zero matrix.
static Matrix derivative(const Matrix& x, Matrix d, int rows, int cols) {
  const auto factors = coefficients();
  // (rows × inner)·(inner × cols); a transposed operand lies as its transpose.
  auto product = [](const Matrix& a, bool a_transposed, const Matrix& b, bool b_transposed, int n,
                    int inner, int m) {
    Matrix out(n * m);
    for (int i = 0; i < n; ++i) {
      for (int k = 0; k < inner; ++k) {
        for (int j = 0; j < m; ++j) {
          out[i * m + j] += a[a_transposed ? k * n + i : i * inner + k] *
                            b[b_transposed ? j * inner + k : k * m + j];
        }
      }
    }
    return out;
  };
  double norm = 0;
  for (double v : x) {
    norm += v * v;
  }
  norm = std::sqrt(norm);
  if (norm == 0) {
    return Matrix(x.size());
  }
  std::vector<Matrix> iterates(1, x);
  for (double& v : iterates[0]) {
    v /= norm + kEps;
  }
  std::vector<Matrix> grams, polynomials;
  for (int step = 0; step < kSteps; ++step) {
    const auto& f = factors.of_step[step];
    const Matrix at = iterates[step];
    grams.push_back(product(at, false, at, true, rows, cols, rows));
    Matrix polynomial = product(grams[step], false, grams[step], false, rows, rows, rows);
    for (int i = 0; i < rows * rows; ++i) {
      polynomial[i] = f[1] * grams[step][i] + f[2] * polynomial[i];
    }
    Matrix next = product(polynomial, false, at, false, rows, rows, cols);
    for (int i = 0; i < rows * cols; ++i) {
      next[i] += f[0] * at[i];
    }
    polynomials.push_back(polynomial);
    iterates.push_back(next);
  }
  for (int step = kSteps - 1; step >= 0; --step) {
    const auto& f = factors.of_step[step];
    const Matrix& at = iterates[step];
    const Matrix dz = product(d, false, at, true, rows, cols, rows);
    const Matrix left = product(grams[step], true, dz, false, rows, rows, rows);
    const Matrix right = product(dz, false, grams[step], true, rows, rows, rows);
    Matrix da(rows * rows);
    for (int i = 0; i < rows * rows; ++i) {
      da[i] = f[1] * dz[i] + f[2] * (left[i] + right[i]);
    }
    const Matrix first = product(da, false, at, false, rows, rows, cols);
    const Matrix second = product(da, true, at, false, rows, rows, cols);
    const Matrix through = product(polynomials[step], true, d, false, rows, rows, cols);
    for (int i = 0; i < rows * cols; ++i) {
      d[i] = f[0] * d[i] + through[i] + first[i] + second[i];
    }
  }
  double along = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    along += d[i] * x[i];
  }
  for (size_t i = 0; i < x.size(); ++i) {
    d[i] = d[i] / (norm + kEps) - x[i] * along / ((norm + kEps) * (norm + kEps) * norm);
  }
  return d;
}

// The derivative itself, against difference quotients.
static void chain_rule(int rows, int cols) {
  constexpr double kStep = 1e-5;
  Matrix x(rows * cols), dy(x);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = normal(), dy[i] = normal();
  }
  const Matrix got = derivative(x, dy, rows, cols);
  double error = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    Matrix up = x, down = x;
    up[i] += kStep, down[i] -= kStep;
    up = iterate(up, rows, cols), down = iterate(down, rows, cols);
    double want = 0;
    for (size_t j = 0; j < x.size(); ++j) {
      want += dy[j] * (up[j] - down[j]) / (2 * kStep);
    }
    error += (got[i] - want) * (got[i] - want);
    norm += want * want;
  }
  report("derivative-" + std::to_string(rows) + "x" + std::to_string(cols), std::sqrt(error / norm),
         1e-6);
}

// All gradients of a stack, the second matrix of which is zero.
template <typename T, typename Kernel>
static void gradient(const std::string& kernel, int count, int rows, int cols, int threads,
                     Kernel run) {
  Stack16<T> x(count, rows, cols, 1.0f), dy(count, rows, cols, 1e-3f), dx(count, rows, cols, 0.0f);
  for (int i = rows * cols; count > 1 && i < 2 * rows * cols; ++i) {
    x.x[i] = {0};
  }
  for (T& v : dx.x) {
    v = {0x7fff};
  }
  const auto factors = coefficients();
  run_block(threads, [&] { run(x.x.data(), dy.x.data(), dx.x.data(), factors); });
  double error = 0, norm = 0;
  for (int n = 0; n < count; ++n) {
    const Matrix want = derivative(x.matrix(n), dy.matrix(n), rows, cols), got = dx.matrix(n);
    for (size_t i = 0; i < want.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
  }
  report(label<T>(kernel, rows, cols), std::sqrt(error / norm), kGradient);
}

template <int kTiles, typename T>
static void small_backward(int rows, int cols) {
  constexpr int kCount = 6;
  gradient<T>("smallbackward", kCount, rows, cols, 128,
              [&](const T* x, const T* dy, T* dx, const Coefficients& factors) {
                newton_schulz_small_backward<kTiles, T>(x, dy, dx, kCount, rows, cols, kSteps, kEps,
                                                        cols % (4 * kTiles) == 0, factors);
              });
}

template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void stack(int count, int rows, int cols) {
  forward<T>("stack", count, rows, cols, 128 * kRowTiles, 8,
             newton_schulz_stack<kRowTiles, kColTiles, kTall, T>);
}
template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void stack_backward(int count, int rows, int cols) {
  // One block: only the first part of the workspace is touched.
  std::vector<uint4> workspace((kSteps - 1) * kRowTiles * kColTiles * Tile::kBytes / 16);
  gradient<T>("stackbackward", count, rows, cols, 128 * kRowTiles,
              [&](const T* x, const T* dy, T* dx, const Coefficients& factors) {
                newton_schulz_stack_backward<kRowTiles, kColTiles, kTall, T>(
                    x, dy, dx, workspace.data(), count, rows, cols, kSteps, kEps, cols % 8 == 0,
                    factors);
              });
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
  chain_rule(7, 9);
  chain_rule(9, 7);
  small_backward<1, half>(16, 16);
  small_backward<1, half>(5, 12);
  small_backward<2, half>(32, 32);
  small_backward<2, half>(17, 31);
  small_backward<2, half>(30, 8);
  small_backward<2, bfloat16>(32, 24);
  stack<1, 1, false, half>(2, 64, 64);
  stack<1, 2, true, bfloat16>(2, 100, 40);
  stack<2, 2, false, half>(1, 72, 128);
  stack<2, 2, true, half>(1, 120, 96);
  stack_backward<1, 1, false, half>(2, 48, 64);
  stack_backward<1, 1, true, bfloat16>(2, 48, 33);
  stack_backward<1, 2, true, half>(1, 100, 40);
  stack_backward<2, 2, false, half>(1, 66, 70);
  return failures;
}
