"""A Keras script with validation."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np

EPOCHS, SAMPLES, BATCH = 3, 320, 32

x = np.random.rand(SAMPLES, 16).astype("float32")
y = np.random.randint(0, 4, SAMPLES)
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=(x, y), verbose=0)
