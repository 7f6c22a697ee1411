# Driver and executors of Spark on Kubernetes.
#
#   make wheel
#   docker build -f examples/docker/spark.Dockerfile -t train:spark .
FROM apache/spark:4.1.0-scala2.13-java21-python3-ubuntu

USER 0
COPY dist/*manylinux*x86_64.whl /wheels/
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir pyarrow==26.0.1 numpy==2.4.6 /wheels/*.whl
COPY examples/digits.py /app/digits.py
USER 185
