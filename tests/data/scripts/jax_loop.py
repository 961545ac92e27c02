"""A JAX loop: there is nothing for the hook to attach to."""

import jax
import jax.numpy as jnp

weights = jnp.zeros((16,))
x, y = jnp.ones((64, 16)), jnp.ones((64,))
step = jax.jit(jax.grad(lambda w: jnp.mean((x @ w - y) ** 2)))
for _ in range(100):
    weights = weights - 0.01 * step(weights)
print("loss", float(jnp.mean((x @ weights - y) ** 2)))
