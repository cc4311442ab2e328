// The Newton–Schulz kernels against the iteration in float64, on the host. Prints a line a case:
// name, relative error, the limit of it. Fails if an error is above its limit.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <newton_schulz/newton_schulz_256_backward_sm90.cuh>
#include <newton_schulz/newton_schulz_256_sm90.cuh>
#include <newton_schulz/newton_schulz_sm80.cuh>
#include <newton_schulz/newton_schulz_sm90.cuh>
#include <newton_schulz/newton_schulz_stack_sm80.cuh>
#include <newton_schulz/newton_schulz_wide_sm90.cuh>

using namespace fastweights;
using Matrix = std::vector<double>;

constexpr float kEps = 1e-7f;
constexpr int kSteps = 5;

// Five steps of fp16 products are 1.1e-3 to 2.7e-3 off.
constexpr double kForward = 4e-3;
// The gradient in float64, but with all that is kept rounded to fp16, is 5e-3 off on 16 × 16
// (median of 200), 4e-3 on 32 × 32.
constexpr double kGradient = 8e-3;
// A difference quotient.
constexpr double kQuotient = 1e-7;

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

// The same iteration in multiples of X that make c one, and the multiple of the first X.
static Coefficients scaled_coefficients(float& first) {
  Coefficients all = coefficients();
  double next = 1;
  for (int step = kSteps - 1; step >= 0; --step) {
    float (&f)[3] = all.of_step[step];
    const double scale = std::pow(f[2] * next, 0.2), ratio = next / scale;
    f[0] *= ratio, f[1] *= ratio / (scale * scale), f[2] = 1;
    next = scale;
  }
  first = next;
  return all;
}

// p·x·y + q·z, x of rows × inner numbers.
static Matrix combine(double p, const Matrix& x, const Matrix& y, double q, const Matrix& z,
                      int rows, int inner) {
  const int cols = int(y.size()) / inner;
  Matrix out(z);
  for (int i = 0; i < rows; ++i) {
    double* const to = &out[i * cols];
    for (int j = 0; j < cols; ++j) {
      to[j] *= q;
    }
    for (int k = 0; k < inner; ++k) {
      const double factor = p * x[i * inner + k];
      const double* const from = &y[k * cols];
      for (int j = 0; j < cols; ++j) {
        to[j] += factor * from[j];
      }
    }
  }
  return out;
}
static Matrix transposed(const Matrix& x, int rows, int cols) {
  Matrix out(x.size());
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) {
      out[j * rows + i] = x[i * cols + j];
    }
  }
  return out;
}
static double dot(const Matrix& x, const Matrix& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}

// A = x·xᵀ and B = b·A + c·A².
struct Polynomial {
  Matrix a, b;

  Polynomial(const Matrix& x, int rows, int cols, const float (&f)[3]) {
    const Matrix none(rows * rows);
    a = combine(1, x, transposed(x, rows, cols), 0, none, rows, cols);
    b = combine(f[2], a, a, f[1], a, rows, rows);
  }
};

// The iterates of R × C numbers, R ≤ C or not: the first and that after each step.
static std::vector<Matrix> iterates(Matrix x, int rows, int cols) {
  const auto factors = coefficients();
  const double norm = std::sqrt(dot(x, x)) + kEps;
  for (double& v : x) {
    v /= norm;
  }
  std::vector<Matrix> all{x};
  for (int step = 0; step < kSteps; ++step) {
    const auto& f = factors.of_step[step];
    const Matrix& at = all.back();
    all.push_back(combine(1, Polynomial(at, rows, cols, f).b, at, f[0], at, rows, rows));
  }
  return all;
}
static Matrix iterate(const Matrix& x, int rows, int cols) {
  return iterates(x, rows, cols).back();
}

// The gradient of ⟨dy, iterate(x)⟩ in x; zeros for a zero matrix.
static Matrix gradient(const Matrix& x, Matrix grad, int rows, int cols) {
  const auto factors = coefficients();
  if (dot(x, x) == 0) {
    return Matrix(x.size());
  }
  const auto all = iterates(x, rows, cols);
  for (int step = kSteps - 1; step >= 0; --step) {
    const auto& f = factors.of_step[step];
    const Matrix& at = all[step];
    const Polynomial of(at, rows, cols, f);
    Matrix s = combine(1, grad, transposed(at, rows, cols), 0, of.a, rows, cols);
    s = combine(1, at, transposed(grad, rows, cols), 1, s, rows, cols);
    const Matrix half = combine(f[2], of.a, s, f[1], s, rows, rows);
    const Matrix both = combine(f[2], s, of.a, 1, half, rows, rows);
    const Matrix scaled = combine(1, of.b, grad, f[0], grad, rows, rows);
    grad = combine(1, both, at, 1, scaled, rows, rows);
  }
  const double norm = std::sqrt(dot(x, x)), along = dot(grad, all[0]);
  for (size_t i = 0; i < x.size(); ++i) {
    grad[i] = grad[i] / (norm + kEps) - all[0][i] * along / norm;
  }
  return grad;
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
  float scale;
  const auto factors = scaled_coefficients(scale);
  run_block(threads, [&] {
    run(in.x.data(), out.x.data(), count, rows, cols, kSteps, scale, kEps, cols % piece == 0,
        factors);
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
template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void wide(int count, int rows, int cols) {
  forward<T>("wide", count, rows, cols, 512, 8, newton_schulz_wide<kRowTiles, kColTiles, kTall, T>);
}
template <int kTiles, typename T>
static void small(int rows, int cols) {
  forward<T>("small", 6, rows, cols, 128, 4 * kTiles, newton_schulz_small<kTiles, T>);
}

// The formula of the gradient against a difference quotient.
static void formula(int rows, int cols) {
  constexpr double kStep = 1e-5;
  const Stack16<half> x(1, rows, cols, 1.0f), dy(1, rows, cols, 1.0f), v(1, rows, cols, 1.0f);
  const Matrix at = x.matrix(0), upstream = dy.matrix(0), along = v.matrix(0);
  Matrix up = at, down = at;
  for (size_t i = 0; i < at.size(); ++i) {
    up[i] += kStep * along[i];
    down[i] -= kStep * along[i];
  }
  const double want =
      (dot(upstream, iterate(up, rows, cols)) - dot(upstream, iterate(down, rows, cols))) /
      (2 * kStep);
  const double got = dot(gradient(at, upstream, rows, cols), along);
  report("formula-" + std::to_string(rows) + "x" + std::to_string(cols),
         std::abs(got - want) / std::abs(want), kQuotient);
}

// All gradients of a stack, the second matrix of which is zero.
template <typename T, typename Kernel>
static void backward(const std::string& kernel, const std::string& config, int count, int rows,
                     int cols, int threads, int piece, size_t ring_bytes, Kernel run) {
  Stack16<T> x(count, rows, cols, 1.0f), dy(count, rows, cols, 1e-3f), dx(count, rows, cols, 0.0f);
  for (int i = rows * cols; count > 1 && i < 2 * rows * cols; ++i) {
    x.x[i] = {0};
  }
  for (T& v : dx.x) {
    v = {0x7fff};
  }
  std::vector<uint4> ring(ring_bytes / sizeof(uint4), uint4{0x7fff7fff, 0x7fff7fff, 0, 0});
  const auto factors = coefficients();
  run_block(threads, [&] {
    run(x.x.data(), dy.x.data(), dx.x.data(), ring.data(), count, rows, cols, cols % piece == 0,
        factors);
  });
  double error = 0, norm = 0;
  for (int n = 0; n < count; ++n) {
    const Matrix got = dx.matrix(n), want = gradient(x.matrix(n), dy.matrix(n), rows, cols);
    for (size_t i = 0; i < want.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
  }
  report(label<T>(kernel, rows, cols) + config, std::sqrt(error / norm), kGradient);
}

template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void tiles_backward(int count, int rows, int cols, int kept) {
  const size_t waiting =
      std::max(kSteps - kept, 0) * size_t(Stack<kRowTiles, kColTiles, kTall>::kBytes);
  backward<T>("tiles_backward", "-" + std::to_string(kept), count, rows, cols, 128 * kRowTiles, 8,
              waiting,
              [=](const T* x, const T* dy, T* dx, uint4* ring, long long count, int rows, int cols,
                  int whole, const Coefficients& factors) {
                newton_schulz_backward<kRowTiles, kColTiles, kTall, T>(
                    x, dy, dx, ring, count, rows, cols, kSteps, kept, kEps, whole, factors);
              });
}
template <bool kTall, typename T>
static void whole_backward(int count, int rows, int cols) {
  backward<T>("256_backward", "", count, rows, cols, 256, 8,
              (kSteps + 1) * size_t(Stack<4, 4, kTall>::kBytes),
              [](const T* x, const T* dy, T* dx, uint4* ring, long long count, int rows, int cols,
                 int whole, const Coefficients& factors) {
                newton_schulz_256_backward<kTall, T>(x, dy, dx, ring, count, rows, cols, kSteps,
                                                     kEps, whole, factors);
              });
}

template <int kTiles, typename T>
static void small_backward(int count, int rows, int cols) {
  backward<T>("small_backward", "", count, rows, cols, 128, 4 * kTiles, 0,
              [](const T* x, const T* dy, T* dx, uint4*, long long count, int rows, int cols,
                 int whole, const Coefficients& factors) {
                newton_schulz_small_backward<kTiles, T>(x, dy, dx, count, rows, cols, kSteps, kEps,
                                                        whole, factors);
              });
}
template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void stack(int count, int rows, int cols) {
  forward<T>("stack", count, rows, cols, 128 * kRowTiles, 8,
             newton_schulz_stack<kRowTiles, kColTiles, kTall, T>);
}
template <int kRowTiles, int kColTiles, bool kTall, typename T>
static void stack_backward(int count, int rows, int cols) {
  constexpr size_t kWorkspace = (kSteps - 1) * kRowTiles * kColTiles * Tile::kBytes;
  backward<T>("stack_backward", "", count, rows, cols, 128 * kRowTiles, 8, kWorkspace,
              [](const T* x, const T* dy, T* dx, uint4* workspace, long long count, int rows,
                 int cols, int whole, const Coefficients& factors) {
                newton_schulz_stack_backward<kRowTiles, kColTiles, kTall, T>(
                    x, dy, dx, workspace, count, rows, cols, kSteps, kEps, whole, factors);
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
  wide<1, 8, false, half>(2, 64, 512);
  wide<1, 8, true, bfloat16>(1, 270, 33);
  wide<1, 16, false, half>(1, 40, 1001);
  wide<2, 8, false, bfloat16>(1, 128, 512);
  wide<2, 8, true, half>(1, 300, 100);
  formula(19, 30);
  formula(30, 19);
  tiles_backward<1, 1, false, half>(2, 48, 64, 5);
  tiles_backward<1, 1, false, half>(2, 48, 64, 3);
  tiles_backward<1, 1, true, bfloat16>(2, 48, 33, 1);
  tiles_backward<1, 2, true, half>(2, 100, 40, 5);
  tiles_backward<1, 4, false, half>(2, 64, 256, 4);
  tiles_backward<1, 4, true, bfloat16>(1, 251, 61, 1);
  tiles_backward<2, 2, false, half>(1, 66, 70, 2);
  tiles_backward<2, 2, true, half>(2, 90, 72, 3);
  tiles_backward<2, 3, false, bfloat16>(1, 120, 184, 2);
  tiles_backward<2, 4, false, half>(1, 128, 256, 1);
  tiles_backward<2, 4, true, half>(1, 243, 101, 1);
  whole_backward<false, half>(1, 256, 256);
  whole_backward<false, bfloat16>(2, 200, 200);
  whole_backward<true, half>(1, 256, 140);
  small_backward<1, half>(6, 16, 16);
  small_backward<1, half>(6, 5, 12);
  small_backward<2, half>(6, 32, 32);
  small_backward<2, half>(6, 17, 31);
  small_backward<2, half>(6, 30, 8);
  small_backward<2, bfloat16>(6, 32, 24);
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
