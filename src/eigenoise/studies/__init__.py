"""The paper's experiments, the demo and the benchmarks: data, settings, resumable runs, results as JSON."""
