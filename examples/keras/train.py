"""Train a classifier of handwritten digits with Keras 3: a script of Horovod's for Keras, with the import changed.

KERAS_BACKEND=torch sparkhvdrun -np 2 python examples/keras/train.py /tmp/digits
"""

from __future__ import annotations

import os
import sys

import sparkhvd.keras as hvd  # first: it chooses Keras' torch backend where nothing else does

import keras  # isort: skip
from sklearn.datasets import load_digits  # isort: skip

BATCH, EPOCHS, RATE = 32, 6, 0.002


def main(folder: str) -> None:
    hvd.init()
    keras.utils.set_random_seed(1)
    images, digits = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    train, test = slice(360, None), slice(None, 360)
    # This rank's rows; equally many on every rank, or one would wait for steps of another.
    number = len(digits[train]) // hvd.size()
    mine = slice(360 + hvd.rank() * number, 360 + (hvd.rank() + 1) * number)

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    rate = RATE * hvd.size()  # the global batch grows with the ranks
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
    ]
    if hvd.rank() == 0:
        os.makedirs(folder, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{folder}/digits.keras"))
    model.fit(
        images[mine],
        digits[mine],
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=(images[test], digits[test]),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        loaded = hvd.load_model(f"{folder}/digits.keras")  # its optimizer is distributed again
        _, accuracy = loaded.evaluate(images[test], digits[test], verbose=0)
        print(f"accuracy of the saved model: {accuracy:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
