// SPDX-License-Identifier: MIT
#include "report.h"

#include <ctime>
#include <fstream>
#include <stdexcept>

#include "commit.h"
#include "truth.h"

namespace bench {

namespace {

std::string cpu_name() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);)
        if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
    return "unknown";
}

std::string utc_now() {
    const std::time_t now = std::time(nullptr);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    return text;
}

std::string shape_text(const Case& c) {
    std::string heads = std::to_string(c.heads_q);
    if (c.heads_kv != c.heads_q) heads += "/" + std::to_string(c.heads_kv);
    return std::to_string(c.batch) + "x" + heads + "x" + std::to_string(c.seq) + "x" + std::to_string(c.head_dim);
}

std::string bytes_text(double bytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 3; ++unit) bytes /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

}  // namespace

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += c;
    }
    return out + '"';
}

Origin make_origin(int threads) { return {threads, cpu_name(), SPATTN_BENCH_COMMIT, utc_now()}; }

Report::Report(Origin origin, const std::string& json_file) : origin_(std::move(origin)) {
    if (json_file.empty()) return;
    json_ = std::fopen(json_file.c_str(), "a");
    if (!json_) throw std::runtime_error("cannot write " + json_file);
}

Report::~Report() {
    if (json_) std::fclose(json_);
}

void Report::heading() {
    std::printf("%s, %d threads, commit %s, %s\n", origin_.cpu.c_str(), origin_.threads, origin_.commit.c_str(),
                origin_.date.c_str());
    std::printf("GFLOP/s on kept pairs; /pair: rate over dense; x dense: time of dense over time here\n\n");
    std::printf("%-22s %-8s %-34s %-15s %8s %10s %8s %6s %6s %8s %9s %10s %8s\n", "case", "pass", "kernel", "shape",
                "density", "us", "GFLOP/s", "GB/s", "/pair", "x dense", "plan us", "layout", "max err");
}

void Report::add(const Case& shape, const Result& r) {
    const bool wrong = !(r.max_err <= error_bound(r.dtype));
    std::printf("%-22s %-8s %-34s %-15s %8.4f %10.1f %8.2f %6.2f %6.2f %8.2f %9.1f %10s %8.1e%s\n", shape.name.c_str(),
                name(r.pass), r.kernel.c_str(), shape_text(shape).c_str(), r.density, r.us, r.gflops, r.gbs,
                r.ratio_dense, r.ratio_dense / r.density, r.plan_us, bytes_text(double(r.layout_bytes)).c_str(),
                r.max_err, wrong ? "  WRONG" : "");
    std::fflush(stdout);
    if (!json_) return;
    std::fprintf(json_,
                 "{\"case\": %s, \"pass\": \"%s\", \"kernel\": %s, \"dtype\": \"%s\", \"shape\": [%lld, %lld, %lld, "
                 "%lld, %lld], \"us\": %.3f, \"gflops\": %.4g, \"gbs\": %.4g, \"density\": %.6g, "
                 "\"ratio_dense\": %.4g, \"plan_us\": %.1f, \"layout_bytes\": %lld, \"max_err\": %.3g, \"runs\": %d",
                 quoted(shape.name).c_str(), name(r.pass), quoted(r.kernel).c_str(), name(r.dtype),
                 (long long)shape.batch, (long long)shape.heads_q, (long long)shape.heads_kv, (long long)shape.seq,
                 (long long)shape.head_dim, r.us, r.gflops, r.gbs, r.density, r.ratio_dense, r.plan_us,
                 (long long)r.layout_bytes, r.max_err < 1e300 ? r.max_err : 1e300, r.runs);
    write_origin();
}

void Report::plan_heading() {
    std::printf("%s, 1 thread, no plan cache, commit %s, %s\nplans for forward and backward; goals beside them\n\n",
                origin_.cpu.c_str(), origin_.commit.c_str(), origin_.date.c_str());
    std::printf("%-22s %9s %11s %9s %11s %9s\n", "pattern", "tokens", "plan ms", "goal", "layout MiB", "goal");
}

void Report::add(const PlanCase& plan, const PlanResult& r) {
    const bool missed = (r.goal_ms > 0 && r.ms > r.goal_ms) || (r.goal_mib > 0 && r.mib > r.goal_mib);
    std::printf("%-22s %9lld %11.3f %9.0f %11.3f %9.0f%s\n", plan.name.c_str(), (long long)r.seq, r.ms, r.goal_ms,
                r.mib, r.goal_mib, missed ? "  MISSED" : "");
    std::fflush(stdout);
    if (!json_) return;
    std::fprintf(json_,
                 "{\"case\": %s, \"pass\": \"plan\", \"shape\": [1, %lld, %lld, %lld, 128], \"plan_us\": %.1f, "
                 "\"layout_bytes\": %.0f, \"goal_us\": %.0f, \"goal_bytes\": %.0f",
                 quoted(plan.name).c_str(), (long long)plan.heads, (long long)plan.heads, (long long)r.seq, r.ms * 1e3,
                 r.mib * 0x1p20, r.goal_ms * 1e3, r.goal_mib * 0x1p20);
    write_origin();
}

void Report::note(const std::string& name, const std::string& text) {
    std::printf("%-22s %s\n", name.c_str(), text.c_str());
    std::fflush(stdout);
}

void Report::write_origin() {
    std::fprintf(json_, ", \"cpu\": %s, \"threads\": %d, \"commit\": %s, \"date\": %s}\n", quoted(origin_.cpu).c_str(),
                 origin_.threads, quoted(origin_.commit).c_str(), quoted(origin_.date).c_str());
    std::fflush(json_);
}

}  // namespace bench
