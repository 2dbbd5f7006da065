"""Measure what compression costs: in quality, in speed, and in the scores of tasks.

What is measured, and on what
    data, real_model     the bundled model and texts, and a real model that is downloaded once
    corpus, mixture      models and texts by name, the sequences cut from them, the default calibration text
    protocol             the sequences to measure on, half of which repeat a part of their cache
    baselines, methods   what others do to a cache, and the methods by name
    quality, stats       what a method loses, and how certain that is
    tasks, lm            lm-eval tasks that need their context, and the lm-eval model that runs them

The commands
    demo                 `cuvee demo`
    report               `cuvee report`, and `cuvee compare`
    blending             what blending chunks loses and recovers
    bench                `cuvee bench`: speed on a CPU, on a GPU, and in a serving engine
    score_tasks          `cuvee tasks`
    lm_command           `cuvee eval`

What they share
    documents, formatting, plots, labels     how reports, numbers and plots look
    runs, progress, timing, machine          folders, progress, timings, and the machine they come from
"""
