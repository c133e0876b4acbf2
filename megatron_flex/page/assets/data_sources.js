'use strict';
/* Dumps and statistics with their packed numbers at hand, for all panes. */
const flexSources = (() => {
  const { page } = flexPage;

  /** A source with its packed numbers at hand. */
  function opened(told) {
    const many = told.names.length, bySite = new Map();
    told.sites.forEach((site, t) => {
      if (site >= 0) bySite.set(site, [...(bySite.get(site) || []), t]);
    });
    const wrong = new Map();
    for (const [tensor, at, text] of told.troubles) wrong.set(at * many + tensor, told.texts[text] || 'it is damaged');
    const source = { ...told, at: Math.max(0, told.iterations.length - 1) };
    source.of = (site) => bySite.get(site) || [];
    source.state = (i, t) => told.state[i * many + t];
    source.trouble = (i, t) => wrong.get(i * many + t);
    source.measure = (name, i, t) => {
      const state = source.state(i, t);
      return (state & 3) ? null : told.measures[name][i * many + t] ?? 0;
    };
    source.heat = (t) => {
      const several = told.heats[t];
      return several && several.find((one) => one.at === source.at);
    };
    source.heatIterations = (t) => (told.heats[t] || []).map((one) => one.at);
    return source;
  }

  /** The iteration that is nearest to the one that is wanted. */
  function nearest(source, wanted) {
    if (wanted === null || wanted === undefined) return Math.max(0, source.iterations.length - 1);
    return source.iterations.reduce((best, n, i) =>
      (Math.abs(n - wanted) < Math.abs(source.iterations[best] - wanted) ? i : best), 0);
  }

  return { nearest, get all() { this.kept = this.kept || page.data.map(opened); return this.kept; } };
})();
