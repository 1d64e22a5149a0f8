// One step of an optimizer on rows of fp32 numbers, with the order of operations of torch's fused kernels: the results are theirs, bit for bit.
#pragma once
#include <cstddef>

namespace zckpt {

enum class Rule { kAdam, kAdagrad, kLion };
constexpr int kRules = 3;

// What a step multiplies with, rounded to fp32 as torch rounds it.
struct Rates {
  float rate;      // Adam: lr / (1 - beta1^step); Adagrad: lr / (1 + (step - 1) lr_decay); Lion: lr
  float shrink;    // decoupled weight decay: 1 - lr * weight_decay; 1 for none
  float decay;     // weight decay that is added to the gradient; 0 for none
  float beta1;     // Lion
  float one_less_beta1;
  float beta2;
  float one_less_beta2;
  float root;      // Adam: sqrt(1 - beta2^step)
  float eps;
};

// Updates `weights` and the states; gradients stay as they are. `first` is exp_avg, or Adagrad's sum; `second` is exp_avg_sq, and
// null where the rule has no second state. None of the arrays overlap. A vector may be cut in parts of multiples of 8 elements.
void step(Rule rule, const Rates& rates, float* weights, const float* gradients, float* first, float* second, size_t count, unsigned threads);

}  // namespace zckpt
