"""Train a classifier of handwritten digits with Keras 3 on a Spark DataFrame, and predict with it.

KERAS_BACKEND=torch python examples/keras/dataframe.py
"""

from __future__ import annotations

import sparkhvd.keras as hvd  # first: it chooses Keras' torch backend where nothing else does

import keras  # isort: skip
from pyspark.sql import SparkSession  # isort: skip
from sklearn.datasets import load_digits  # isort: skip


def main() -> None:
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    images, digits = load_digits(return_X_y=True)
    rows = [
        ((pixels / 16).tolist(), int(digit), number % 5 == 0)
        for number, (pixels, digit) in enumerate(zip(images, digits, strict=True))
    ]
    df = spark.createDataFrame(rows, ["pixels", "digit", "held_out"])

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    estimator = hvd.KerasEstimator(
        model=model,
        optimizer=keras.optimizers.Adam(0.004),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols=["pixels"],
        label_cols=["digit"],
        num_proc=2,
        batch_size=32,
        epochs=6,
        validation="held_out",
        callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2)],
        checkpoint_callback=hvd.callbacks.BestModelCheckpoint("val_loss"),
    )
    fitted = estimator.fit(df)
    print(f"val_accuracy: {fitted.history[-1]['val_accuracy']:.3f}")

    predicted = fitted.transform(df.where("held_out")).select("digit", "digit__output").collect()
    right = sum(row.digit == row.digit__output.toArray().argmax() for row in predicted)
    print(f"accuracy of {len(predicted)} predictions: {right / len(predicted):.3f}")


if __name__ == "__main__":
    main()
