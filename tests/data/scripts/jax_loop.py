"""A JAX loop, which the hook does not support."""

import jax
import jax.numpy as jnp

weights = jnp.zeros((16,))
x, y = jnp.ones((64, 16)), jnp.ones((64,))
step = jax.jit(jax.grad(lambda w: jnp.mean((x @ w - y) ** 2)))
for _ in range(100):
    weights = weights - 0.01 * step(weights)
print("loss", float(jnp.mean((x @ weights - y) ** 2)))
